"""The costs of a real model's layers, counted while it runs on fake tensors: nothing is allocated or computed.

Fake tensors carry shape, dtype and device. So torch takes its path for a CPU, attention kernel included, and autograd
saves the same tensors as in a real run. A dispatch mode sees every function below autograd. Hooks on the layers, and
the parameters that a function reads, say to which layer it belongs.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functional_call
from torch.nn.modules import transformer

from workbench.core.model_costs import ModelCosts, find_blocks
from workbench.core.rows import in_order_of_calls
from workbench.errors import StrategyError
from workbench.tensors.dispatch.placeholder_calls import has_data
from workbench.tensors.fake_mode import FakeTensorConverter, fake_mode, fake_state, without_log
from workbench.tensors.program_state import ProgramState, tables_of
from workbench.training.batches import Batch, arguments, own_loss
from workbench.training.costs.flex_attention import with_flex_attention
from workbench.training.costs.times import DTYPES
from workbench.training.costs.work_counter import WorkCounter, tensors_in
from workbench.training.sample_rows import count_samples
from workbench.training.strategies.blocks import numbered_blocks
from workbench.training.strategies.fused_experts import count_experts
from workbench.training.strategies.state import ROOT, describe, layers_of

READS_VALUES = DataDependentOutputException, DynamicOutputShapeException
Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]


def layer_costs(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
    dtype: str | torch.dtype | None = None,
) -> ModelCosts:
    """Functions, bytes and shapes of every layer, by a step on fake tensors. It does not change the model.

    Args:
        model: a module, on any device or on meta, or a function that makes it (called under ``torch.device("meta")``).
        inputs: a batch: a tensor, several, keyword arguments as a dict, or the shape of a tensor of floats. Figures
            are divided by its first dim; nobody reads the values.
        loss_fn: of output and targets; counted with the last layer. If it reads values (CTC, a boolean mask), only what
            it does before that is counted, with a warning. None: the model's own loss, or all that it returns.
        targets: of the same batch; None: a dict's ``labels``, as for ``wb.forward_backward``.
        dtype: "fp32", "bf16", "fp16" or the dtype of torch: counts as if parameters and inputs had it. None: their own.

    Raises:
        StrategyError: no parameters, no batch dim, another dtype, a forward that depends on values, or one that fails
            by itself.

    >>> costs = layer_costs(nn.Linear(4, 8), torch.zeros(2, 4))
    >>> costs.rows[0].own[0].flops, costs.rows[0].output_shape
    (64.0, (8,))
    """
    dtype = _known(dtype)
    module = model if isinstance(model, nn.Module) else made_for_shapes(model)
    layers = describe(module)
    if next(module.parameters(), None) is None:
        raise StrategyError(f"layer_costs({type(module).__name__}): 0 parameters; a plan needs at least 1 layer.")
    name = dtype or _name_of(_dtype_of(module))
    with _unchanged(module, loss_fn, is_given=module is model):
        counter, sample_shape, unread = _count(module, inputs, loss_fn, targets, dtype)
    if unread:
        warnings.warn(
            f"layer_costs({type(module).__name__}): the loss's own work is not counted from {unread} on, which reads "
            "values: costs are counted without values. Those of the layers are complete.",
            stacklevel=3,
        )
    order = {name: at for at, name in enumerate(counter.order([layer.name for layer in layers]))}
    layers = [replace(layer, calls=(order[layer.name],) * 2, place=at) for at, layer in enumerate(layers)]
    layers = [replace(layer, chosen=layer.experts and counter.chosen.get(layer.name, 0)) for layer in layers]
    if dtype:
        layers = [replace(layer, itemsize=DTYPES[dtype].itemsize, itemsizes={}) for layer in layers]
    layers = in_order_of_calls(layers)
    rows = tuple(counter.row(layer) for layer in layers)
    heads = tuple(sorted(counter.heads | heads_of(module)))
    again = numbered_blocks(module, [layer.name for layer in layers])
    costs = ModelCosts(
        rows, sample_shape, name, find_blocks(rows), heads, calls=counter.calls(layers), recomputed=again,
        is_traced=True,
    )  # fmt: skip
    if dtype != "fp32" and (dtype or all(parameter.dtype != torch.float32 for parameter in module.parameters())):
        return costs
    try:
        with _unchanged(module, loss_fn, is_given=module is model):
            counter, *_ = _count(module, inputs, loss_fn, targets, dtype, is_cast=True)
    except StrategyError as error:
        cause = error.__cause__
        warnings.warn(
            f"layer_costs({type(module).__name__}): under autocast to bfloat16 the model fails, and so would training "
            f"in 16 bits, which is priced from the work in 32 bits. {type(cause).__name__}: {cause}",
            stacklevel=3,
        )
        return costs
    autocast = tuple(counter.row(layer) for layer in layers)
    return replace(costs, autocast=autocast, autocast_calls=counter.calls(layers))


def _count(
    module: nn.Module, inputs: Inputs, loss_fn: Callable[..., torch.Tensor] | None, targets: Any, dtype: str | None,
    is_cast: bool = False,
) -> tuple[WorkCounter, tuple[int, ...], str]:  # fmt: skip
    """A step under a counter, the shape of a sample, and the function at which the loss reads values; "" without one.

    ``is_cast``: forward runs under autocast, the loss does not, as in strategies of 16 bits; on fake tensors it goes by
    what a CPU casts. Backward begins at a loss; at the output where there is none, or it reads values.
    """
    mode = fake_mode(allow_non_fake_inputs=True)
    cast_to = DTYPES[dtype] if dtype else None
    state, fakes = fake_state(module, mode, cast_to), FakeTensorConverter(mode, cast_to)
    given = Batch.of_arguments(_as_shape(inputs), targets, loss_fn)
    batch = fakes(given.inputs)
    num_samples = _num_samples(batch)
    has_frozen = any(not parameter.requires_grad for parameter in module.parameters())
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    counter = WorkCounter(_owners(module, state), num_samples, shapes, has_frozen)
    output, result, unread = None, None, ""
    try:
        counting = counter.watch(dict(layers_of(module)), batch)
        with without_log(), without_values(module), with_flex_attention(counter), mode, torch.enable_grad(), counting:
            positional, named = arguments(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                output = functional_call(module, state, positional, named)
            try:
                result = own_loss(output) if loss_fn is None else loss_fn(output, fakes(given.targets))
            except READS_VALUES as error:
                unread = str(error.func)
            counter.go_backward(output if result is None else result)
    except READS_VALUES as error:
        raise StrategyError(
            f"layer_costs({type(module).__name__}): {error.func} reads values of tensors {counter.where()}. Costs are "
            "counted without values: compute it from shapes, or outside of forward. If it is the model's own loss, "
            "leave the labels out of inputs, or pass the loss as loss_fn. Distributions of torch do not "
            "read after Distribution.set_default_validate_args(False)."
        ) from error
    except Exception as error:  # the model's own code may raise anything
        where = counter.where() if output is None else "in the loss"
        raise StrategyError(
            f"layer_costs({type(module).__name__}): {type(error).__name__} {where} on this batch: "
            f"{str(error).rstrip('.')}. Give inputs (and targets, where loss_fn takes some) with which the model runs."
        ) from error
    del output, result
    return counter, given.sample_shape, unread


@contextmanager
def _unchanged(module: nn.Module, loss_fn: Any, is_given: bool) -> Iterator[None]:
    """A context after which module and loss have what they had before it; else fake tensors would stay in attributes.

    Of a module that was given, random numbers and what the code of the loss names also go on as before. One that was
    made for its shapes may be counted beside other threads, which draw numbers and set variables.
    """
    code = [loss_fn] if is_given else []
    held = [module, loss_fn, *tables_of(module)]
    program = ProgramState(held, torch.device("cpu"), code=code, copies_tensors=False)
    try:
        yield
    finally:
        if is_given:
            program.put_back()
        else:
            program.put_back_objects()


def made_for_shapes(make: Callable[[], nn.Module]) -> nn.Module:
    """Make the model on meta, or with data if making it needs values (``linspace(...).tolist()``)."""
    try:
        return made_on_meta(make)
    except (NotImplementedError, RuntimeError):
        return make()


def made_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without data. A function that loads weights would warn that they go nowhere; that is meant here."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
        return make()


def _owners(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    """Layers by the address of their parameters' storages; several where a weight is tied."""
    owners: dict[int, list[str]] = {}
    for path, layer in layers_of(module):
        prefix = f"{path}." if path else ""
        for short, _ in layer.named_parameters(recurse=False):
            owners.setdefault(state[prefix + short].untyped_storage()._cdata, []).append(path or ROOT)
    return owners


def _as_shape(inputs: Inputs) -> Any:
    is_shape = isinstance(inputs, Sequence) and bool(inputs) and all(isinstance(size, int) for size in inputs)
    return torch.empty(list(inputs), device="meta") if is_shape else inputs  # type: ignore[arg-type]


def _num_samples(batch: Any) -> int:
    tensors = tensors_in(batch)
    first = next((tensor for tensor in tensors if tensor.ndim), None)
    if first is None or first.shape[0] == 0:
        told = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)}"
        raise StrategyError(
            f"layer_costs: the inputs hold {told}; a batch of at least 1 sample is needed, e.g. (1, 784)."
        )
    return count_samples(tensors) or first.shape[0]


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of most parameters. Whole numbers, such as a quantized model's weights, are computed in another one."""
    numbers: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            numbers[parameter.dtype] += parameter.numel()
    return max(numbers, key=numbers.__getitem__, default=torch.float32)


def _known(dtype: str | torch.dtype | None) -> str | None:
    """The name of a dtype as which costs can be counted."""
    name = _name_of(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is not None and name not in DTYPES:
        known = ", ".join(f"{short!r} ({of_torch})" for short, of_torch in DTYPES.items())
        raise StrategyError(
            f"layer_costs: dtype={dtype!r}, but costs are counted as {known}. Give one of these 3, or leave it out for "
            "the model's own."
        )
    return name


def _name_of(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "encoder_attention_heads",
    "decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
)  # fmt: skip
"""Names under which modules and their configurations keep it: torch's, those of transformers, and usual ones."""


def heads_of(module: nn.Module) -> set[int]:
    """All numbers of heads that the parts of a module, or their configurations, name.

    >>> heads_of(nn.TransformerEncoderLayer(16, 4, 32))
    {4}
    """
    places = [place for part in module.modules() for place in (part, getattr(part, "config", None))]
    found = (getattr(place, name, None) for place in places if place is not None for name in HEADS)
    return {number for number in found if isinstance(number, int) and not isinstance(number, bool) and number > 0}


_detect: Any = transformer._detect_is_causal_mask
_turn = threading.Lock()
_inside: list[bool] = []
"""Whether torch used oneDNN before, once for each thread inside: simulated ranks and panels count at the same time."""


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """A context in which torch's own code that reads values goes by shapes: a square mask of torch's transformers is a
    causal one. Recurrent layers call functions whose work is known, on CPUs too.
    """
    with _turn:
        now = torch.backends.mkldnn.set_flags(False)[0]
        _inside.append(_inside[0] if _inside else now)
        transformer._detect_is_causal_mask = _is_square
    try:
        with even_experts(module):
            yield
    finally:
        with _turn:
            was_enabled = _inside.pop()
            if not _inside:
                transformer._detect_is_causal_mask = _detect
                torch.backends.mkldnn.set_flags(was_enabled)


def _is_square(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    if mask is not None and has_data(mask):  # in another thread, which does not count
        is_causal_one: bool = _detect(mask, is_causal, size)
        return is_causal_one
    if is_causal is None and mask is not None:
        return mask.shape == 2 * (size or mask.shape[-2],)
    return is_causal is True


@contextmanager
def even_experts(module: nn.Module) -> Iterator[None]:
    """A context in which fused experts whose forward reads values give a result of the right shape and work."""
    found = [part for part in module.modules() if "forward" not in vars(part) and count_experts(part)]
    for part in found:
        part.forward = partial(_forward, part)
    try:
        yield
    finally:
        for part in found:
            del vars(part)["forward"]


def _forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(part).forward(part, *args, **kwargs)
    except READS_VALUES:
        return _evenly(part, *args, *kwargs.values())


def _evenly(part: nn.Module, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each matrix of each expert takes its share of the rows; a gated result is cut to what the last matrix takes."""
    matrices = [getattr(part, name) for name, parameter in part.named_parameters(recurse=False) if parameter.ndim == 3]
    experts, num_rows = len(matrices[0]), numbers.numel()
    rows = tokens.flatten(0, -2).repeat_interleave(numbers.shape[-1], 0)
    rows = torch.cat([rows, rows.new_zeros(-num_rows % experts, rows.shape[1])]).view(experts, -1, rows.shape[1])
    for matrix in matrices:
        first, second = matrix.shape[1:]
        taken = rows.shape[-1]
        if matrix is matrices[-1]:  # gives the width of a token
            taken = second if first == tokens.shape[-1] else first
        rows = torch.bmm(rows[..., :taken], matrix if taken == first else matrix.transpose(1, 2))
    results = rows.flatten(0, 1)[:num_rows] * weights.flatten()[:, None]
    return results.view(*numbers.shape, -1).sum(-2)
