"""The job on which strategies are compared. It is checked before any engine starts, so that mistakes show at once."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any
from zlib import crc32

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.rows import Layer, count_parameters
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError
from workbench.tensors.agreement import fingerprint
from workbench.tensors.program_state import all_seeded, undrawn
from workbench.tensors.reached_objects import OF_TORCH, PLAIN_VALUES, contents_of_cell, is_of_others
from workbench.training.datasets import checksum_of, num_samples_of
from workbench.training.runs.job import Job
from workbench.training.traced_calls import describe_with_calls

_MAX_LINES = 4
"""Of a function whose source describes the optimizer."""
_MAX_LENGTH = 200
"""Characters of a description; a longer one is a checksum."""
_NOT_SET = ("", "None", "False")


@dataclass(frozen=True)
class Subject:
    """A job, the layers of its model, the shape of one sample of the model's first input, and texts that describe
    model, optimizer, loss and samples. Variables that functions read may have other values later; engines have these.
    """

    job: Job
    layers: list[Layer]
    sample_shape: tuple[int, ...]
    texts: dict[str, str]

    @classmethod
    def of(
        cls,
        model_fn: Callable[[], Any],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        optimizer_fn: Callable[[Any], Any] | None = None,
        batch_size: int,
        steps: int,
        **options: Any,
    ) -> Subject:
        """A subject of the arguments of ``wb.compare``. It makes the model once in this process, to find its layers.

        Args:
            options: others of `Job`: seed, collate_fn, shuffle, drop_last, count.

        Raises:
            RunError: the job cannot be trained, see `Job`.
        """
        job = Job(model_fn, dataset, loss_fn, optimizer_fn, batch_size, steps, **options)
        with undrawn():
            model = job.model()
            texts = {"model": function_name(model_fn), "model_checksum": _checksum(repr(model))}
            optimizer = job.optimizer(model)  # a mistake in it shows now
            texts |= {"optimizer": _optimizer_text(optimizer_fn, optimizer)}
            texts |= {"optimizer_options": _options_text(optimizer)}
            texts |= {"loss": _described(loss_fn) or "the model's own", "count": _described(job.count) or "samples"}
            with all_seeded(0):  # samples that draw random numbers are the same for every comparison
                batch = job.first_batch()
            first = fingerprint(tree_leaves((batch.inputs, batch.targets)))
            texts |= {"first_samples": f"{first} of {checksum_of(job.dataset)}"}
            return cls(job, describe_with_calls(model, batch), batch.sample_shape, texts)

    def settings(self) -> dict[str, Any]:
        """A description of the job, for tables and files."""
        job = self.job
        return {
            **self.texts,
            "num_parameters": count_parameters(self.layers),
            "batch_size": job.batch_size,
            "steps": job.num_steps,
            "sample_shape": "x".join(map(str, self.sample_shape)) or "scalar",
            "num_samples": num_samples_of(job.dataset),
            "shuffle": job.shuffle,
            "drop_last": job.drop_last,
            "seed": job.seed,
        }

    def strategy(self, wanted: StrategyLike, num_ranks: int) -> Strategy:
        """A strategy from a preset's name, a text, a dict of rows or itself, checked against the model.

        Raises:
            StrategyError: it does not fit the model or the number of ranks.
        """
        strategy = strategy_of(wanted, self.layers, num_ranks)
        strategy.resolve(self.layers, num_ranks)
        return strategy

    def strategies(self, named: Mapping[str, StrategyLike], num_ranks: int) -> dict[str, Strategy]:
        """Several of them, by name.

        Raises:
            StrategyError: some do not fit; it has what is wrong with each.
        """
        fitting, mistakes = dict[str, Strategy](), list[StrategyError]()
        for name, wanted in named.items():
            try:
                fitting[name] = self.strategy(wanted, num_ranks)
            except StrategyError as error:
                mistakes.append(error)
        if len(mistakes) == 1:
            raise mistakes[0]
        if mistakes:
            first = f"{len(mistakes)} of {len(named)} strategies do not fit, and nothing has run:"
            raise StrategyError("\n".join([first, *map(str, mistakes)]))
        return fitting


def function_name(function: Any) -> str:
    """The name of a function, of what a partial calls, or of the class of an object; empty for None."""
    while isinstance(function, partial):
        function = function.func
    return "" if function is None else getattr(function, "__name__", type(function).__name__)


def _described(function: Any) -> str:
    """The name of a function, with what makes it another one: the options of a partial or of an object, and of a
    function of the program a checksum of its code, and the variables that it reads. Empty for None.
    """
    name, own = function_name(function), dict[str, Any]()
    while isinstance(function, partial):
        own = {**{str(place): value for place, value in enumerate(function.args)}, **function.keywords, **own}
        function = function.func
    if isinstance(function, FunctionType):
        if not is_of_others(function):  # type: ignore[arg-type]
            codes = list(_codes(function.__code__))
            name += f"#{_checksum([(code.co_code, _constants(code), code.co_names) for code in codes])}"
            own = {**_variables(function, codes), **own}
    elif not isinstance(function, (type, BuiltinFunctionType)):
        buffers = dict(function.named_buffers()) if isinstance(function, nn.Module) else {}
        own = {**getattr(function, "__dict__", {}), **buffers, **own}
    options = {key: text for key, value in own.items() if key not in OF_TORCH and (text := _option(value))}
    texts = _shortened(", ".join(f"{key}={text}" for key, text in options.items()))
    return f"{name}({texts})" if texts else name


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> list[Any]:
    plain = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    return [sorted(map(repr, one)) if isinstance(one, frozenset) else one for one in plain]


def _variables(function: FunctionType, codes: list[CodeType]) -> dict[str, Any]:
    """The variables of a function that are set before it is called: its module's that its code reads, those around it,
    and its defaults.
    """
    steps = (step for code in codes for step in dis.get_instructions(code))
    read = sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"})
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {
        **{name: function.__globals__[name] for name in read if name in function.__globals__},
        **{name: value for name, cell in cells for value in contents_of_cell(cell)},
        **{name: given.default for name, given in inspect.signature(function).parameters.items()},
    }


def _option(value: Any) -> str:
    """A plain value, or a tensor's checksum; empty for any other."""
    if isinstance(value, Tensor):
        return fingerprint([value])
    leaves = tree_leaves(value, is_leaf=lambda part: not isinstance(part, (tuple, list, dict)))
    return _shortened(repr(value)) if all(type(leaf) in PLAIN_VALUES for leaf in leaves) else ""


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"#{_checksum(text)}"


def _checksum(value: Any) -> str:
    """Of a value's text, without addresses: these are others in every process."""
    return f"{crc32(_without_addresses(value).encode()):08x}"


def _without_addresses(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))


def _optimizer_text(optimizer_fn: Any, made: Optimizer) -> str:
    """The optimizer's source, if it is a function of a few lines; else its name. A lambda has what it has made: its
    source is all of the line, with the call that it is given to.
    """
    if optimizer_fn is None:
        return "SGD(lr=0.1, momentum=0.9)"
    if not hasattr(optimizer_fn, "__qualname__"):
        return _without_addresses(optimizer_fn)
    if optimizer_fn.__name__ == "<lambda>":
        return f"{type(made).__name__}({_options_text(made)})"
    if inspect.isfunction(optimizer_fn):
        with suppress(OSError):
            source = inspect.getsource(optimizer_fn).strip()
            if source.count("\n") < _MAX_LINES:
                return source
    return f"{optimizer_fn.__module__}.{optimizer_fn.__qualname__}"


def _options_text(optimizer: Optimizer) -> str:
    """The options of an optimizer's groups of parameters, such as the learning rate, those of equal groups once."""
    texts = []
    for group in optimizer.param_groups:
        options = {name: _option(value) for name, value in group.items() if name != "params"}
        texts.append(", ".join(f"{name}={text}" for name, text in options.items() if text not in _NOT_SET))
    return _shortened("; ".join(dict.fromkeys(texts)))


__all__ = ["StrategyLike", "Subject", "function_name"]
