"""Few rows for many layers, with patterns over modules and over runs of equal blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from workbench.core.rows import Row, quoted, range_of


@dataclass
class _Module:
    """A module and its submodules; ``own`` is the row of its own parameters."""

    own: Row | None = None
    parts: dict[str, _Module] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Rows of all layers in it, its own first."""
        below = [row for part in self.parts.values() for row in part.rows()]
        return below if self.own is None else [self.own, *below]


def compress_patterns(names: Sequence[str], rows: Sequence[Row]) -> tuple[Row, ...]:
    """Few rows with the same choices as ``rows``, which has one row per name; patterns of ``rows`` are ignored.

    A module whose layers all have one choice becomes one row. Neighbouring blocks with equal choices become one range.
    A block whose layers mostly agree becomes one row and its exceptions.

    >>> names = ["emb", *[f"blocks.{n}.{part}" for n in range(4) for part in ("norm", "fc")], "head"]
    >>> rows = [Row("", "model" if "fc" in name else "data") for name in names]
    >>> print(*compress_patterns(names, rows), sep="; ")
    emb: data; blocks.[0-3].norm: data; blocks.[0-3].fc: model; head: data
    """
    root = _Module()
    for name, row in zip(names, rows, strict=True):
        module = root
        for part in name.split("."):
            module = module.parts.setdefault(part, _Module())
        module.own = replace(row, pattern="")
    if len(set(root.rows())) == 1:
        return (replace(root.rows()[0], pattern="*"),)
    return tuple(_parts(root))


def _written(module: _Module) -> list[Row]:
    """Rows of a module. Patterns begin below it; that of the module itself is empty."""
    rows = module.rows()
    if len(set(rows)) == 1:
        return rows[:1]
    if module.own is not None:
        return [module.own, *_parts(module, usual=module.own)]
    each = _parts(module)
    usual = Counter(rows).most_common(1)[0][0]
    exceptions = [usual, *_parts(module, usual)]
    return exceptions if len(exceptions) < len(each) else each


def _parts(module: _Module, usual: Row | None = None) -> list[Row]:
    """Rows of the submodules, without those equal to ``usual``; equal numbered neighbours become one range."""
    written = [(name, tuple(_written(part))) for name, part in module.parts.items()]
    found: list[Row] = []
    for (_, rows), group in groupby(written, key=lambda item: (item[0].isdecimal(), item[1])):
        names = [name for name, _ in group]
        if rows == (usual,):
            continue
        found_range = range_of(names, module.parts)
        for pattern in [found_range] if found_range else map(quoted, names):
            found += [replace(row, pattern=f"{pattern}.{row.pattern}" if row.pattern else pattern) for row in rows]
    return found
