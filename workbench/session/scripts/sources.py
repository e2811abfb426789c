"""Where a script takes the user's functions from: an import, or a place to fill in."""

from __future__ import annotations

import importlib
import keyword
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import RunError

WIDTH = 88
"""Longest line of a script, as formatters take it."""

_FILL_IN = {
    "model_fn": ("model_fn() -> torch.nn.Module", "Makes the model."),
    "dataset": ("dataset() -> torch.utils.data.Dataset", "Returns all samples."),
    "loss_fn": ("loss_fn(output, targets) -> torch.Tensor", "Returns a scalar, the mean over the samples."),
    "optimizer_fn": ("optimizer_fn(parameters) -> torch.optim.Optimizer", "Makes the optimizer."),
    "collate_fn": ("collate_fn(samples)", "Makes a batch from a list of samples."),
    "count": ("count(inputs, targets)", "Returns the number of terms of a micro-batch's mean loss."),
}
"""By role: the signature, and what the function does."""


@dataclass(frozen=True)
class Source:
    """One of the user's functions, or the data set, under the name of its role.

    Attributes:
        role: its name in the script, such as ``model_fn``.
        module, name: where the script imports it from; None for a place to fill in.
        value: the function itself, or the data set; None if it is not known.
    """

    role: str
    module: str | None = None
    name: str = ""
    value: Any = None

    @classmethod
    def of(cls, role: str, given: Any) -> Source:
        """The source of what a user gives: ``"module:name"``, a function, a data set, or None.

        Raises:
            RunError: a text of another form, or a name that is not there.

        >>> Source.of("loss_fn", "torch.nn.functional:mse_loss").imported
        'mse_loss as loss_fn'
        """
        if isinstance(given, str):
            module, _, name = given.partition(":")
            return cls(role, module, name, _load(role, given, module, name))
        home, name = str(getattr(given, "__module__", None)), str(getattr(given, "__qualname__", ""))
        if (
            home in sys.modules
            and home != "__main__"
            and is_importable(home)
            and getattr(sys.modules[home], name, None) is given
        ):
            return cls(role, home, name, given)
        return cls(role, value=given)

    @property
    def imported(self) -> str:
        """What the script imports from the module."""
        return self.name + (f" as {self.role}" if self.name != self.role else "")

    @property
    def is_of_library(self) -> bool:
        """Whether it comes from torch or the workbench, and not from a file of the user."""
        return str(self.module).partition(".")[0] in ("torch", "workbench")

    @property
    def fill_in(self) -> str:
        """A function that the user is to write."""
        signature, what = _FILL_IN[self.role]
        passed = "" if self.value is None else f"    # you passed: {self._named()}\n"
        return f'def {signature}:\n    """{what}"""\n{passed}    raise NotImplementedError("FILL IN: {self.role}")\n'

    def _named(self) -> str:
        """The name of the function, or of the class of an object."""
        is_named = hasattr(self.value, "__qualname__")
        named = self.value if is_named else type(self.value)
        home = "" if named.__module__ in ("__main__", "builtins") else f"{named.__module__}."
        return f"{home}{named.__qualname__}{'' if is_named else '(...)'}"

    @property
    def is_called(self) -> bool:
        """Whether a data set is a function that returns it."""
        return self.module is None or makes_dataset(self.value)

    @property
    def samples(self) -> Any:
        """The data set; None if it is not known."""
        return self.value() if makes_dataset(self.value) else self.value


def makes_dataset(value: Any) -> bool:
    """Whether a value is no data set, but a function or a class that makes one when it is called."""
    return callable(value) and (isinstance(value, type) or not hasattr(value, "__getitem__"))


def is_importable(module: str) -> bool:
    """Whether ``from module import ...`` is Python.

    >>> is_importable("models.gpt"), is_importable("models.lambda"), is_importable("my-model")
    (True, False, False)
    """
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split("."))


def _load(role: str, given: str, module: str, name: str) -> Any:
    if not name or ":" in name:
        raise RunError(f"{role}={given!r} is not of the form 'module:name'. Write e.g. {role}='mine:{role}'.")
    for part in (*module.split("."), name):
        if not is_importable(part):
            raise RunError(
                f"{role}={given!r}: a script cannot import {part!r}, which is no name in Python or a word of its own. "
                f"Call it something else, e.g. {role}='mine:{role}'."
            )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # an import in the file
            raise
        raise RunError(
            f"{role}={given!r}: no module {error.name!r} here. Start Python in the folder of {module}.py, or leave "
            f"{role} out: the script then has a place for it."
        ) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise RunError(f"{role}={given!r}: {module} has no {name!r}. Name a function that it defines.") from error


def imports_of(sources: Iterable[Source], plain: Iterable[str], libraries: Mapping[str, Sequence[str]]) -> str:
    """The imports of a script as sorters of imports leave them: those of libraries, then those of the user's files.

    Args:
        plain: statements ``import ...``.
        libraries: by module, the names that the script takes from it.
    """
    first, own = dict[str, list[str]](), dict[str, list[str]]()
    for source in sources:
        if source.module is not None:
            (first if source.is_of_library else own).setdefault(source.module, []).append(source.imported)
    for module, names in libraries.items():
        first.setdefault(module, []).extend(names)
    blocks = ([*sorted(plain), *_statements(first)], _statements(own))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _statements(by_module: Mapping[str, list[str]]) -> list[str]:
    """Sorted; a name that gets another one is imported alone."""
    lines = []
    for module in sorted(by_module):
        names = sorted(by_module[module], key=_as_sorted)
        alike = [name for name in names if " as " not in name]
        groups = [*([alike] if alike else []), *([name] for name in names if " as " in name)]
        lines += [import_of(module, group) for group in sorted(groups, key=lambda group: _as_sorted(group[0]))]
    return lines


def _as_sorted(name: str) -> tuple[bool, str]:
    """Classes come before functions."""
    return name[0].islower() or name[0] == "_", name


def import_of(module: str, names: list[str]) -> str:
    """An import as formatters write it: on one line if it fits, else a name on each line.

    >>> import_of("mine", ["dataset", "model_fn"])
    'from mine import dataset, model_fn'
    """
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
