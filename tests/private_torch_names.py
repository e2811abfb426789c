"""The private names of torch on which the package relies, and the versions of torch that have been found to have them.

Any version may rename or remove them. ``test_private_torch_names`` holds the list against the sources and against the
torch that runs, and ``make matrix`` runs it with several versions.
"""

CHECKED_ON = ("2.11", "2.12", "2.13", "2.14")

NAMES = """
# Which dispatch applies: modes, subclasses, autograd
torch._C.DisableTorchFunction
torch._C.DisableTorchFunctionSubclass
torch._C.DispatchKey.ADInplaceOrView
torch._C.DispatchKey.AutogradFunctionality
torch._C.DispatchKeySet
torch._C._AutoDispatchBelowAutograd
torch._C._DisableAutocast
torch._C._EnableTorchFunction
torch._C._ExcludeDispatchKeyGuard
torch._C._are_functorch_transforms_active
torch._C._dispatch_tls_is_dispatch_key_excluded
torch._C._functorch.is_functorch_wrapped_tensor
torch._C._is_any_autocast_enabled
torch._C._is_torch_function_enabled
torch._C._is_torch_function_mode_enabled
torch._C._len_torch_dispatch_stack
torch._C._len_torch_function_stack
torch._C._pop_torch_dispatch_stack
torch._C._pop_torch_function_stack
torch._C._set_grad_enabled
torch.utils._device._device_constructors
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._python_dispatch._disable_current_modes
torch.utils._python_dispatch._get_current_dispatch_mode_stack
torch.utils._python_dispatch._pop_mode
torch.utils._python_dispatch._push_mode

# The graph of autograd, and what it saves
torch._C._autograd._get_current_graph_task_keep_graph
torch._C._autograd._get_sequence_nr
torch._C._autograd._pop_saved_tensors_default_hooks
torch._C._autograd._top_saved_tensors_default_hooks
torch._C._current_autograd_node
torch._C._current_graph_task_id
torch._C._will_engine_execute_node
torch.Tensor._backward_hooks
torch.Tensor._post_accumulate_grad_hooks
torch.Tensor._use_count
torch.Tensor._version
torch.autograd.Variable._execution_engine.queue_callback
torch.autograd.graph.Node._sequence_nr
torch.autograd.graph._engine_run_backward
torch.utils.checkpoint._allowed_determinism_checks_to_fns
torch.utils.checkpoint._default_meta_extractor

# Memory, and torch's profiler
torch.UntypedStorage._cdata
torch._C._autograd._enable_record_function
torch._C._autograd._profiler_enabled
torch._C._construct_storage_from_data_pointer
torch._C._storage_Use_Count
torch.cuda.memory._record_memory_history
torch.cuda.memory._snapshot

# Operators and their schemas
torch._C._jit_get_schemas_for_operator
torch._amp_foreach_non_finite_check_and_unscale_
torch._foreach_copy_
torch._foreach_mul
torch._foreach_mul_
torch._foreach_norm
torch._grouped_mm
torch._ops.OpOverload
torch._ops.OpOverload._op
torch._ops.OpOverload._overloadpacket
torch._ops.OpOverload._schema
torch._ops.OpOverloadPacket
torch._ops.OpOverloadPacket._qualified_op_name
torch._safe_softmax
torch._scaled_mm
torch.jit._builtins._get_builtin_table
torch.ops.aten._grouped_mm
torch.ops.aten._local_scalar_dense.default
torch.ops.aten._scaled_dot_product_efficient_attention
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
torch.ops.aten._to_copy.default

# Parts of torch's Python functions, and what is wrapped or refused
torch._C._nn.cross_entropy_loss
torch._C._nn.nll_loss_nd
torch._functorch.eager_transforms._wrap_for_grad
torch._functorch.vmap._add_batch_dim
torch.autograd.Function._backward_cls._forward_cls
torch.autograd.function._SingleLevelFunction
torch.distributed.fsdp._fully_shard._fully_shard._validate_module
torch.nn._reduction.legacy_get_string
torch.nn.attention.bias.CausalBias._dispatch
torch.nn.functional._canonical_mask
torch.nn.functional._in_projection_packed
torch.nn.functional._mha_shape_check
torch.nn.functional._none_or_dtype
torch.nn.init._calculate_correct_fan
torch.nn.utils.clip_grad._clip_grads_with_norm_
torch.nn.utils.clip_grad._get_total_norm

# Modules and optimizers
torch.amp.grad_scaler.GradScaler._unscale_grads_
torch.nn.Module._backward_hooks
torch.nn.Module._backward_pre_hooks
torch.nn.Module._buffers
torch.nn.Module._call_impl
torch.nn.Module._compiled_call_impl
torch.nn.Module._forward_hooks
torch.nn.Module._forward_pre_hooks
torch.nn.Module._load_state_dict_pre_hooks
torch.nn.Module._maybe_warn_non_full_backward_hook
torch.nn.Module._modules
torch.nn.Module._non_persistent_buffers_set
torch.nn.Module._parameters
torch.nn.MultiheadAttention._reset_parameters
torch.nn.modules.batchnorm._NormBase
torch.nn.modules.module._global_backward_hooks
torch.nn.modules.module._global_backward_pre_hooks
torch.nn.modules.module._global_forward_hooks
torch.nn.modules.module._global_forward_pre_hooks
torch.nn.modules.transformer._detect_is_causal_mask
torch.optim.Optimizer._optimizer_state_dict_post_hooks
torch.optim.Optimizer._optimizer_step_code
torch.optim.Optimizer._optimizer_step_post_hooks
torch.optim.Optimizer._optimizer_step_pre_hooks
torch.optim.optimizer._global_optimizer_post_hooks
torch.optim.optimizer._global_optimizer_pre_hooks

# Tensors without data, and the compiler
torch._C._ensureCUDADeviceGuardSet
torch._C._dynamo.eval_frame
torch._dynamo.convert_frame.CatchErrorsWrapper
torch._dynamo.exc.SkipFrame
torch._dynamo.types.ConvertFrameReturn
torch._dynamo.types.FrameAction.SKIP
torch._dynamo.types.FrameExecStrategy
torch._dynamo.variables.builder.VariableBuilder._wrap
torch._higher_order_ops.utils.setup_compilation_env
torch.jit._recursive.create_script_module
torch.jit._trace.TracedModule
torch._inductor.runtime.cache_dir_utils.cache_dir
torch._inductor.standalone_compile
torch._subclasses.fake_tensor.DataDependentOutputException
torch._subclasses.fake_tensor.DynamicOutputShapeException
torch._subclasses.fake_tensor.FakeTensor
torch._subclasses.fake_tensor.FakeTensorMode

# Nested values
torch.utils._pytree.TreeSpec
torch.utils._pytree.tree_flatten
torch.utils._pytree.tree_flatten_with_path
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map
torch.utils._pytree.tree_map_only
torch.utils._pytree.tree_unflatten

# Processes and files, and scripts that are written for torch alone
torch._C._distributed_c10d.TCPStore
torch.distributed.ProcessGroup._get_backend
torch.distributed.algorithms._checkpoint.checkpoint_wrapper
torch.distributed.checkpoint.filesystem._StorageInfo
torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict
torch.distributed.distributed_c10d._abort_process_group
torch.distributed.distributed_c10d._world.pg_map
torch.distributed.distributed_c10d._world.pg_names
"""

OPTIONAL = """
torch._C._distributed_c10d._dump_nccl_trace_json of builds with NCCL
torch.library.CustomOpDef._opoverload of operators that torch.library.custom_op makes
torch.utils._python_dispatch.TorchDispatchMode._mode_key of torch's own modes
"""
"""Names that are asked for with ``getattr`` and a default."""

NOT_OF_TORCH = {
    "ipyparallel": "_build_targets _children _config _control_stream _io_loop _start_waiting",
    "IPython": "_reloader _showtraceback",
    "ipywidgets": "_control_comm _handle_control_comm_msg _instances",
    "torchao": "_AdamBase _subclass_zeros",
    "transformers": "_keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save",
    "tqdm": "_decr_instances",
    "Python": "_current_exceptions _current_frames _exec _fields _find_and_load _getframe _set_running_loop",
    "the workbench, by names that classes of torch have, too": "_handle _name _tags _values",
}
