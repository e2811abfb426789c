"""``flow.global_function``: a function with placeholders becomes a job that all devices run together."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from workbench.errors import JobError
from workbench.flow import config as devices
from workbench.flow.jobs.run import Job, run
from workbench.flow.jobs.settings import FunctionConfig
from workbench.flow.jobs.store import store_of
from workbench.flow.old_spellings import warn_old_spelling
from workbench.flow.typing import Callback, ListNumpy, Numpy, Placeholder
from workbench.flow.world_join import launched_world


def global_function(
    type: Any = None, function_config: FunctionConfig | None = None
) -> Callable[[Callable[..., Any]], JobFunction]:
    """Declare a job: ``@flow.global_function(type="train")``.

    Each call runs the body on all devices: those of the session (the first call starts one if needed), or these ranks
    if all ranks run the program. Arguments and results are numpy arrays.

    Args:
        type: ``"train"`` updates variables, ``"predict"`` (the default) does not.
        function_config: settings, see ``flow.function_config``.

    Raises:
        JobError: an argument without a placeholder, placeholders of both views, or a view other than the config's.
    """
    if isinstance(type, FunctionConfig):
        kind = "train" if type.train.is_set else "predict"
        warn_old_spelling("global_function(config)", f'global_function(type="{kind}", function_config=config)')
        function_config, type = type, kind  # noqa: A001 - the argument's name is fixed
    if callable(type):
        raise JobError(
            f"global_function on {getattr(type, '__name__', type)}: it is used without brackets. Write "
            '@flow.global_function(type="train").'
        )
    settings = copy.deepcopy(function_config or FunctionConfig())  # as they are at the declaration
    if type is None:
        type = "train" if settings.train.is_set else "predict"  # noqa: A001
    if type not in ("train", "predict"):
        raise JobError(f'global_function(type={type!r}): types are "train" and "predict".')

    def declare(body: Callable[..., Any]) -> JobFunction:
        return JobFunction(body, type == "train", settings, sys._getframe(1).f_locals)

    return declare


class JobFunction:
    """The result of ``global_function``; call it with arrays.

    Attributes:
        job: the part that is sent to the ranks.
    """

    def __init__(
        self, body: Callable[..., Any], trains: bool, config: FunctionConfig, names: Mapping[str, Any] | None = None
    ) -> None:
        """``names``: names for annotations that are strings, in addition to the globals of the function."""
        name = body.__name__
        functools.update_wrapper(self, body)
        signature = inspect.signature(body, eval_str=True, locals=names)
        placeholders = dict(_placeholders(signature, name, config))
        results = list(_result_types(signature.return_annotation))
        view = _view(name, placeholders, results, config)
        self.takes_callback = _is_callback(signature.return_annotation)
        self._signature = signature
        self.job = Job(name, body, view, trains, placeholders, config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the job.

        Raises:
            TypeError: the wrong arguments, or an argument of another kind or dtype.
            ValueError: an array of another shape, or a list of another length.
            CellError: the body failed on an engine; the message shows its line.
        """
        arrays = self._check(args, kwargs)
        world = launched_world()
        if world is not None:
            result = run(self.job, arrays, store_of(world), devices.chosen())
        else:
            from workbench.flow.jobs import driver

            result = driver.call(self.job, arrays, devices.chosen())
        return (lambda callback: callback(result)) if self.takes_callback else result

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.job.name}: {error}. It takes {', '.join(self.job.placeholders)}.") from None
        bound.apply_defaults()
        return {
            name: self.job.placeholders[name].check(value, f"{self.job.name}: the argument {name!r}")
            for name, value in bound.arguments.items()
        }

    def __repr__(self) -> str:
        kind = "train" if self.job.trains else "predict"
        return f"<job {self.job.name}: {kind}, {self.job.view} view>"


def _placeholders(signature: inspect.Signature, job: str, config: FunctionConfig) -> Iterator[tuple[str, Placeholder]]:
    for name, parameter in signature.parameters.items():
        if not isinstance(parameter.annotation, Placeholder):
            said = "no annotation" if parameter.annotation is parameter.empty else f"{parameter.annotation!r}"
            raise JobError(
                f"{job}: the argument {name!r} has {said}, and a job's arguments have placeholders. Write e.g. "
                f"{name}: tp.Numpy.Placeholder((100, 1, 28, 28), dtype=flow.float)."
            )
        yield name, parameter.annotation.with_default(config.dtype)


def _result_types(annotation: Any) -> Iterator[type[Numpy]]:
    """Each ``Numpy`` and ``ListNumpy`` in the annotation of the result."""
    if annotation in (Numpy, ListNumpy):
        yield annotation
    for part in [annotation.result] if _is_callback(annotation) else typing.get_args(annotation):
        yield from _result_types(part)


def _is_callback(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Callback)


def _view(name: str, placeholders: Mapping[str, Placeholder], results: list[Any], config: FunctionConfig) -> str:
    """The config's view, or else that of the placeholders. All of them must agree."""
    kinds = {f"the argument {argument!r}": found.is_list for argument, found in placeholders.items()}
    kinds |= dict.fromkeys(["the result"] if results else [], any(result.is_list for result in results))
    inferred = "mirrored" if any(kinds.values()) else "consistent"
    view = inferred if config.view is None else config.view.name
    wrong = [what for what, is_list in kinds.items() if is_list != (view == "mirrored")]
    if wrong:
        wanted, other = ("ListNumpy", "Numpy") if view == "mirrored" else ("Numpy", "ListNumpy")
        opposite = "consistent" if view == "mirrored" else "mirrored"
        raise JobError(
            f"{name}, a job in the {view} view: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} {other}. The "
            f"{view} view has {wanted} throughout: type it so, or take the other view, "
            f"function_config().default_logical_view(flow.scope.{opposite}_view())."
        )
    return view
