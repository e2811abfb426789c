"""Refuses modules with global parameters in torch.compile, torch.export, torch.jit, DataParallel,
DistributedDataParallel and FSDP.

An average of a model's weights (``AveragedModel``) is a copy that works, where the model is.

Two systems cannot both own a module's parameters: DistributedDataParallel and FSDP would sum or cut what is a term or a
shard already, without a word. torch.compile cannot look into layouts; ``wb.capture`` records a step without them. A
compiled function of global tensors runs uncompiled.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves

from workbench.errors import LayoutError, StrategyError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.patch_table import install_loaded, patch

_INSTEAD = {
    "DistributedDataParallel": 'Leave it out: wb.parallelize(module, "*: data") sums gradients during backward.',
    "DataParallel": 'Leave it out: wb.parallelize(module, "*: data") spreads the batch over the ranks, each with a GPU '
    "of its own. A library that wraps the module by itself must see one GPU: set CUDA_VISIBLE_DEVICES to LOCAL_RANK "
    "before CUDA is used.",
    "FullyShardedDataParallel": 'Leave it out: wb.parallelize(module, "*: data | zero=3") shards the parameters.',
    "fully_shard": 'Leave it out: wb.parallelize(module, "*: data | zero=3") shards the parameters.',
    "torch.compile": 'Write step = wb.capture(step, backend="inductor"), which compiles a whole step between its '
    "exchanges; or compile functions of "
    "plain tensors, and call them through wb.local_map.",
}
_INSTEAD.update(
    dict.fromkeys(
        ("torch.export", "torch.jit.trace", "torch.jit.script"),
        "Call wb.checkpoint.export_safetensors(module, folder) on all ranks, and give it a plain model that has loaded "
        "the file with safetensors.torch.load_file.",
    )
)
_REFUSED = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "OptimizedModule": "torch.compile",
}


def refuse(what: str, module: nn.Module) -> None:
    """Raise ``StrategyError`` if ``module`` has global parameters."""
    parameters = list(module.parameters())
    count = sum(isinstance(parameter, GlobalTensor) for parameter in parameters)
    if count:
        raise StrategyError(
            f"{what}({type(module).__name__}): {count} of its {len(parameters)} parameters are global tensors of "
            f"wb.parallelize. Their layouts say who holds what, and {what} knows nothing of them. {_INSTEAD[what]}"
        )


def refuse_wrapped(module: nn.Module) -> None:
    """Raise ``StrategyError`` if another system has wrapped the module or a part of it."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        what = _REFUSED.get(kind) or ("torch.compile" if type(part._compiled_call_impl).__name__ == "function" else "")
        if kind.startswith(("FSDP", "FullySharded")):
            what = "FullyShardedDataParallel" if kind.startswith("Fully") else "fully_shard"
        foreign = [each for each, p in part.named_parameters(recurse=False) if type(p).__name__ == "DTensor"]
        if foreign and not what:
            raise StrategyError(
                f"parallelize({type(module).__name__}): parameters of {name or 'the whole'!r} are DTensors of torch, "
                f"{foreign[0]!r} for one. Only one system can own a module. Leave parallelize_module or "
                'distribute_module out, and say it in the strategy: wb.parallelize(module, "up: model:column; '
                'down: model:row").'
            )
        if not isinstance(part, torch.jit._trace.TracedModule):  # these take hooks
            refuse_scripted(part, f"parallelize({type(module).__name__})")
        if what:
            raise StrategyError(
                f"parallelize({type(module).__name__}): 1 module is wrapped by {what}, {name or 'the whole'!r} "
                f"({kind}). Only one system can own a module. Give the module itself. {_INSTEAD[what]}"
            )


def refuse_scripted(part: nn.Module, asked: str) -> None:
    """Raise ``StrategyError`` if TorchScript has compiled a module with parameters."""
    if isinstance(part, torch.jit.ScriptModule) and (count := len(list(part.parameters()))):
        raise StrategyError(
            f"{asked}: {part.original_name} is a {type(part).__name__} of torch.jit with {count} parameters. Its "
            "compiled code keeps its own parameters, and reads no others. Give the module as it was before "
            "torch.jit.script, trace or load; a function of tensors, or a module without parameters, may be compiled."
        )


_NAMES = ("module", "model", "mod", "func", "nn_module")
"""Names of the argument that is the module."""


def _refusing(what: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """``function``, after a look at the module that is its argument number ``place``."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        module = args[place] if len(args) > place else next((kwargs[name] for name in _NAMES if name in kwargs), None)
        if isinstance(module, nn.Module):
            refuse(what, module)
        elif what == "torch.compile":
            importlib.import_module("torch._dynamo.variables.builder")  # torch.compile would
            install_loaded()
        return function(*args, **kwargs)

    return checked


class _Meeting(threading.local):
    """Whether the function that this thread's compiler looks at reads a global tensor."""

    is_global = False


_meeting = _Meeting()


def _meeting_global_tensors(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """``wrap``, which the compiler calls for each value that a function reads; a global tensor ends its work."""
    from torch._dynamo.exc import SkipFrame

    @functools.wraps(wrap)
    def wrapped(self: Any, value: Any) -> Any:
        if isinstance(value, GlobalTensor):
            _meeting.is_global = True
            raise SkipFrame("it reads a global tensor, whose layout the compiler does not know")
        return wrap(self, value)

    return wrapped


def _leaving_to_rules(convert: Callable[..., Any]) -> Callable[..., Any]:
    """``convert``, which compiles a function when it is called: a call that reads global tensors runs uncompiled,
    with all that it calls. Its operations go by their rules. Calls with plain tensors are compiled.
    """
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    uncompiled = ConvertFrameReturn(
        frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
    )

    @functools.wraps(convert)
    def converted(self: Any, frame: Any, *args: Any) -> Any:
        _meeting.is_global = any(isinstance(leaf, GlobalTensor) for leaf in tree_leaves(dict(frame.f_locals)))
        result = uncompiled if _meeting.is_global else convert(self, frame, *args)
        if not _meeting.is_global:
            return result
        _meeting.is_global = False
        _count_as_compiled()
        return uncompiled

    return converted


def _count_as_compiled() -> None:
    """``fullgraph=True`` counts compiled functions since torch 2.13, and is an error without one."""
    exchange = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if exchange is not None:
        count = exchange(-1)  # while nobody counts
        exchange(count + 1 if count >= 0 else count)


def _check_averaged(self: swa_utils.AveragedModel, model: nn.Module) -> None:
    """Raise ``LayoutError`` if the copy stayed where the model was before it got another strategy."""
    pairs = [
        (name, mean._spec.layout, parameter._spec.layout)
        for (name, mean), parameter in zip(self.module.named_parameters(), model.parameters(), strict=False)
        if isinstance(mean, GlobalTensor) and isinstance(parameter, GlobalTensor)
    ]
    apart = [pair for pair in pairs if not pair[1].placement.has_ranks_of(pair[2].placement)]
    if apart:
        name, old, new = apart[0]
        raise LayoutError(
            f"AveragedModel.update_parameters({type(model).__name__}): {len(apart)} of {len(pairs)} parameters lie on "
            f"other ranks than their averages, the first is {name!r}, {new}, with its average {old}. An average is "
            "taken where both are, and wb.parallelize(model, strategy) moves the model alone; the first step does so "
            "under the preset pipeline. Make the copy after it, or give it the same strategy: "
            "wb.parallelize(averaged.module, strategy)."
        )


def _checking_averages(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_parameters(self: swa_utils.AveragedModel, model: nn.Module) -> None:
        _check_averaged(self, model)
        update(self, model)

    return update_parameters


_WHY = "a compiled function would take a shard for the whole"
patch("torch._dynamo.variables.builder.VariableBuilder._wrap", _WHY, _meeting_global_tensors)
patch("torch._dynamo.convert_frame.CatchErrorsWrapper.__call__", _WHY, _leaving_to_rules)

_REFUSED_AT = {
    "torch.compile": ("torch.compile", 0),
    "torch.nn.Module.compile": ("torch.compile", 0),
    "torch.export.export": ("torch.export", 0),
    "torch.jit.trace": ("torch.jit.trace", 0),
    # ``torch.jit.script`` looks up names where it is called, so the patch replaces a later step.
    "torch.jit._recursive.create_script_module": ("torch.jit.script", 0),
    "torch.nn.DataParallel.__init__": ("DataParallel", 1),
    "torch.nn.parallel.DistributedDataParallel.__init__": ("DistributedDataParallel", 1),
    "torch.distributed.fsdp.FullyShardedDataParallel.__init__": ("FullyShardedDataParallel", 1),
    # Many modules import the name ``fully_shard``, so the patch replaces its first step.
    "torch.distributed.fsdp._fully_shard._fully_shard._validate_module": ("fully_shard", 0),
}
"""Address -> what is refused for a module with global parameters, and which argument the module is."""
for place, (what, index) in _REFUSED_AT.items():
    patch(
        place,
        f"{what} on global parameters would sum, cut or trace shards as if each were the whole",
        functools.partial(_refusing, what, place=index),
    )
patch(
    "torch.optim.swa_utils.AveragedModel.update_parameters",
    "an average that lies on other ranks than its model would be taken of the wrong shards",
    _checking_averages,
)
