"""Random functions on global tensors: in-place filling, ``*_like``, distributions. Values depend on the logical
position.

Keys come from the generator argument, or else from the world's generator. Parameters that torch refuses are refused by
its own functions: numbers on all ranks, and tensors where a rank holds what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workbench.core.layout import Layout, Shape
from workbench.core.sbp import Split, broadcast
from workbench.tensors import random
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.local_call import can_read, local_call, sum_terms
from workbench.tensors.dispatch.placeholder_calls import write_placeholder
from workbench.tensors.dispatch.planning import check_as_torch
from workbench.tensors.dispatch.registry import filler, handler
from workbench.tensors.global_tensor import GlobalTensor, local_torch, new_placeholder, spec_of, wrap
from workbench.tensors.random import UNUSED, check_filling, largest_integer


def sample(
    like: GlobalTensor,
    layout: Layout,
    shape: Shape,
    sampler: random.Sampler,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """A random tensor of any shape and layout in the world of ``like``. All ranks of the world call it."""
    spec = spec_of(like._spec.world, layout, shape)
    key = random.draw_key(spec.world, generator, is_used=not spec.is_placeholder)
    if spec.is_placeholder:
        return wrap(new_placeholder(spec.shape, dtype, spec.world.device), spec)
    return wrap(random.sample_shard(sampler, key, spec.layout, spec.shape, dtype, spec.world), spec)


def _check_values(function: Callable[..., Any], values: torch.Tensor) -> None:
    """Raise torch's own error for a distribution with the values of a rank as parameters."""
    if values.numel() and can_read(values):
        function(torch.stack(values.aminmax()), generator=UNUSED)


def sample_of_shape(like: GlobalTensor, shape: Shape, sampler: random.Sampler, dtype: torch.dtype) -> GlobalTensor:
    """A random tensor of any shape, whole on every rank of the placement of ``like``."""
    return sample(like, like._spec.layout.broadcast(), shape, sampler, dtype)


def _options(names: str, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(names.split(), args, strict=False)) | kwargs


def _like(tensor: GlobalTensor, sampler: random.Sampler, options: dict[str, Any]) -> GlobalTensor:
    dtype = options.get("dtype") or tensor.dtype
    shape = tensor._spec.shape
    result = sample(tensor, tensor._spec.layout.without_terms(), shape, sampler, dtype, options.get("generator"))
    if options.get("requires_grad"):
        result.requires_grad_()
    return result


def _standard(name: str, filling: str, sampler: random.Sampler) -> None:
    """Register ``torch.name_like`` in the layout of the input, and ``torch.name(size, out=...)``."""

    @handler(f"{name}_like")
    def like(func: Any, args: Any, kwargs: Any) -> Any:
        check_filling(filling, kwargs.get("dtype") or args[0].dtype)
        return _like(args[0], sampler, kwargs)

    @filler(name)
    def of_size(args: Any, options: dict[str, Any], out: GlobalTensor) -> GlobalTensor:
        check_filling(filling, out.dtype)
        return _sized(out, args if isinstance(args[0], int) else args[0], sampler, options)


_standard("rand", "uniform_", random.uniform_sampler())
_standard("randn", "normal_", random.normal_sampler())


@handler("randint_like")
def randint_like(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.randint_like(input, high)`` or ``(input, low, high)``."""
    bounds = [*args[1:], *(kwargs[name] for name in ("low", "high") if name in kwargs)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    check_filling("random_", kwargs.get("dtype") or args[0].dtype, low, high)
    return _like(args[0], random.integer_sampler(int(low), int(high)), kwargs)


def _fill(tensor: GlobalTensor, sampler: random.Sampler, generator: torch.Generator | None) -> GlobalTensor:
    layout, shape = tensor._spec.layout.without_terms(), tensor._spec.shape
    return _write(tensor, sample(tensor, layout, shape, sampler, tensor.dtype, generator))


def _write(tensor: GlobalTensor, values: GlobalTensor) -> GlobalTensor:
    values = box(values, tensor._spec.layout)
    if tensor._spec.is_placeholder:
        return write_placeholder(tensor, [tensor])
    with local_torch():
        tensor.copy_(values)
    return tensor


def _filling(name: str, names: str, make: Callable[..., random.Sampler]) -> None:
    """Register an in-place filling ``Tensor.name_(...)`` with the arguments of its sampler."""

    @handler(name)
    def fill(func: Any, args: Any, kwargs: Any) -> Any:
        options = _options(f"tensor {names}", args, kwargs)
        tensor, generator = options.pop("tensor"), options.pop("generator", None)
        check_filling(f"{name}_", tensor.dtype, **options)
        parameters = dict(zip(names.split(), make.__code__.co_varnames, strict=False))
        settings = {parameters[torch_name]: value for torch_name, value in options.items()}
        return _fill(tensor, make(**settings), generator)


_filling("uniform", "from to", random.uniform_sampler)
_filling("exponential", "lambd", random.exponential_sampler)
_filling("geometric", "p", random.geometric_sampler)
_filling("log_normal", "mean std", random.log_normal_sampler)
_filling("cauchy", "median sigma", random.cauchy_sampler)


@handler("random")
def random_(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.random_()``, ``random_(to)``, ``random_(from, to)``: random integers; default: all that the dtype can
    hold.
    """
    tensor = args[0]
    bounds = [*args[1:], *(kwargs[name] for name in ("from", "to") if kwargs.get(name) is not None)]
    if len(bounds) == 2 and bounds[1] is not None:
        low, high = bounds
    elif bounds and len(bounds) == 1 and "from" not in kwargs:
        low, high = 0, bounds[0]
    else:
        low, high = (bounds[0] if bounds else 0), largest_integer(tensor.dtype) + 1
    if bounds:
        check_filling("random_", tensor.dtype, low, high)
    return _fill(tensor, random.integer_sampler(int(low), int(high)), kwargs.get("generator"))


@handler("normal")
def normal(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.normal_(mean, std)``, and ``torch.normal`` with tensors of means, of deviations, or both."""
    if func.__name__ == "normal_":
        options = _options("tensor mean std", args, kwargs)
        mean, std = options.get("mean", 0.0), options.get("std", 1.0)
        check_filling("normal_", options["tensor"].dtype, mean, std)
        return _fill(options["tensor"], random.normal_sampler(mean, std), options.get("generator"))
    options = _options("mean std", args, kwargs)
    mean, std = options.get("mean", 0.0), options.get("std", 1.0)
    tensors = [value for value in (mean, std) if isinstance(value, GlobalTensor)]
    if not tensors:
        return NotImplemented
    shapes = [tuple(value.shape) for value in (mean, std) if isinstance(value, torch.Tensor)]
    shape = tuple(torch.broadcast_shapes(*shapes))
    like = next((tensor for tensor in tensors if tuple(tensor.shape) == shape), None)
    layout = tensors[0]._spec.layout.broadcast() if like is None else like._spec.layout.without_terms()
    dtype = tensors[0].dtype
    check_filling("normal_", dtype, 0.0, 1.0 if isinstance(std, torch.Tensor) else std)
    if isinstance(std, GlobalTensor):
        std = sum_terms(std)
    if isinstance(std, torch.Tensor) and not tensors[0]._spec.is_placeholder:
        with local_torch():
            _check_values(partial(torch.normal, 0.0), std.detach())
    noise = sample(tensors[0], layout, shape, random.normal_sampler(), dtype, options.get("generator"))
    values = noise * _constant(std) + _constant(mean)
    return _linked(values, tensors)


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _linked(values: GlobalTensor, tensors: list[GlobalTensor]) -> GlobalTensor:
    """``values`` with torch's gradient of a sample with respect to its parameters: zero."""
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return values
    layouts = [values._spec.layout, *(tensor._spec.layout for tensor in tensors)]
    out = (values._spec.layout, values._spec.shape, values.dtype)

    def link(value: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        nothing = sum(parameter.flatten()[:0].sum() for parameter in parameters)
        return value + nothing.to(value.dtype)  # type: ignore[union-attr]

    return local_call(link, [values, *tensors], layouts, out, "a random function")


def _transformed(
    parameter: GlobalTensor, transform: Callable[..., torch.Tensor], dtype: torch.dtype, generator: Any
) -> GlobalTensor:
    """``transform(uniform, parameter)`` element by element, in the layout of the parameter."""
    given = sum_terms(parameter)
    spec = given._spec
    numbers = sample(given, spec.layout, spec.shape, random.uniform_sampler(), torch.float64, generator)
    detached: Any = given.detach()
    out = (spec.layout, spec.shape, dtype)
    values = local_call(transform, [numbers, detached], [spec.layout, spec.layout], out, "a random function")
    return _linked(values, [given])


@handler("bernoulli")
def bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.bernoulli_(p)`` with a number or a tensor; ``torch.bernoulli(probabilities)``."""
    options = _options("tensor p", args, kwargs)
    tensor, p, generator = options["tensor"], options.get("p"), options.get("generator")
    if isinstance(p, torch.Tensor):
        probabilities: Any = (torch.zeros_like(tensor, dtype=p.dtype) + p).detach()
        return _write(tensor, _transformed(probabilities, partial(_hits, tensor.dtype), tensor.dtype, generator))
    if func.__name__ == "bernoulli_" or p is not None:
        p = 0.5 if p is None else p
        check_filling("bernoulli_", tensor.dtype, p)
        sampler = random.bernoulli_sampler(p)
        is_filled = func.__name__ == "bernoulli_"
        return _fill(tensor, sampler, generator) if is_filled else _like(tensor, sampler, {"generator": generator})
    return _transformed(tensor, partial(_hits, tensor.dtype), tensor.dtype, generator)


def _hits(dtype: torch.dtype, uniform: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    _check_values(torch.bernoulli, at)
    return (uniform < at).to(dtype)


@handler("poisson")
def poisson(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.poisson(rates)``: the smallest count at which the distribution function exceeds a uniform number."""
    options = _options("input generator", args, kwargs)
    rates = options["input"]
    return _transformed(rates, _poisson_quantile, rates.dtype, options.get("generator"))


def _poisson_quantile(at: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """The smallest count with ``P(X <= count) > at``, by bisection between zero and 40 deviations."""
    _check_values(torch.poisson, rate)
    rates = rate.double()
    low, high = torch.full_like(rates, -1.0), (rates + 40 * rates.sqrt() + 40).floor()
    steps = int(high.max().item() + 2).bit_length() if high.numel() else 0
    for _ in range(steps):
        middle = ((low + high) / 2).floor()
        passed = torch.special.gammaincc(middle + 1, rates) > at
        low, high = torch.where(passed, low, middle), torch.where(passed, middle, high)
    return torch.where(rates == 0, 0.0, high).to(rate.dtype)


@handler("multinomial")
def multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    """Categories drawn row by row. Rows may be split; the categories of a row stay whole."""
    options = _options("input num_samples replacement", args, kwargs)
    weights, count = sum_terms(options["input"]), options["num_samples"]
    shape, layout = weights._spec.shape, weights._spec.layout
    check_as_torch(torch.multinomial, weights, count, bool(options.get("replacement")))
    last = len(shape) - 1
    layout = layout.with_sbp(tuple(broadcast if entry == Split(last) else entry for entry in layout.sbp))
    noise_shape = (*shape[:-1], count) if options.get("replacement") else shape
    sampler = random.uniform_sampler() if options.get("replacement") else random.exponential_sampler()
    noise = sample(weights, layout, noise_shape, sampler, torch.float64, options.get("generator"))

    def draw(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if weight.numel() and can_read(weight):
            smallest_sum = weight.sum(-1, dtype=torch.float64).min().reshape(1)
            for few in (torch.stack(weight.aminmax()), smallest_sum):
                torch.multinomial(few, 1, generator=UNUSED)  # raises torch's error
        if not options.get("replacement"):
            return (weight.double() / numbers).topk(count).indices
        reached = weight.double().cumsum(-1)
        return torch.searchsorted(reached / reached[..., -1:], numbers, right=True)

    detached: Any = weights.detach()
    out = (layout, (*shape[:-1], count), torch.int64)
    return local_call(draw, [detached, noise], [layout, layout], out, "multinomial")


def _whole_with_generator(name: str) -> None:
    """Register a distribution that is drawn on the whole tensor as on one device, in order, from a generator with the
    key as its seed.
    """

    @handler(name)
    def draw(func: Any, args: Any, kwargs: Any) -> Any:
        options = dict(zip(("generator",), args[2 if name == "binomial" else 1 :], strict=False)) | kwargs
        given = [*args[: 2 if name == "binomial" else 1], *(kwargs[key] for key in ("count", "prob") if key in kwargs)]
        like = next(value for value in given if isinstance(value, GlobalTensor))
        world, layout = like._spec.world, like._spec.layout.broadcast()
        generator = torch.Generator(world.device).manual_seed(random.draw_key(world, options.get("generator")))
        operands = [value if isinstance(value, GlobalTensor) else from_local(value, world, layout) for value in given]
        shape = tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
        out = (layout, shape, operands[0].dtype)
        return local_call(
            lambda *whole_ones: func(*whole_ones, generator=generator), operands, [layout] * len(operands), out, name
        )


for _name in ("binomial", "_standard_gamma", "_sample_dirichlet"):
    _whole_with_generator(_name)


@filler("randint")
def randint(args: Any, options: dict[str, Any], out: GlobalTensor) -> GlobalTensor:
    """``torch.randint(high, size)`` or ``(low, high, size)``."""
    given = _options("low high size" if len(args) == 3 or "low" in options else "high size", args, options)
    low, high = given.get("low", 0), given["high"]
    check_filling("random_", out.dtype, low, high)
    return _sized(out, given["size"], random.integer_sampler(low, high), options)


@filler("normal")
def normal_of_size(args: Any, options: dict[str, Any], out: GlobalTensor) -> GlobalTensor:
    """``torch.normal(mean, std, size)`` with numbers."""
    given = _options("mean std size", args, options)
    check_filling("normal_", out.dtype, given["mean"], given["std"])
    return _sized(out, given["size"], random.normal_sampler(given["mean"], given["std"]), options)


@filler("randperm")
def randperm(args: Any, options: dict[str, Any], out: GlobalTensor) -> GlobalTensor:
    """The integers below the first argument, in random order."""
    numbers = random.permutation(args[0], out.dtype, out._spec.world, options.get("generator"))
    return from_local(numbers, out._spec.world, out._spec.layout)


def _sized(out: GlobalTensor, size: Any, sampler: random.Sampler, options: dict[str, Any]) -> GlobalTensor:
    return sample(out, out._spec.layout.without_terms(), tuple(size), sampler, out.dtype, options.get("generator"))
