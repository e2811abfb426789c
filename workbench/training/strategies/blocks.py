"""The blocks of a model, which recomputation runs again as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from torch import nn


def numbered_blocks(module: nn.Module, names: Sequence[str]) -> tuple[int, ...]:
    """For each layer the number of the block that has it; -1 for a layer outside of blocks.

    >>> chain = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    >>> numbered_blocks(chain, ["0.0", "1"])
    (0, -1)
    """
    numbers = {block: number for number, block in enumerate(repeated_blocks(module))}
    paths = {path: numbers[inner] for path, inner in module.named_modules() if inner in numbers}
    return tuple(paths.get(module_around(name, paths), -1) for name in names)


def module_around(path: str, known: Container[str]) -> str:
    """The path of the innermost of these modules that a module is, or is a part of; empty for any other module.

    >>> module_around("blocks.3.fc", {"blocks.3": 3})
    'blocks.3'
    """
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists, sequences and dicts of modules that have submodules, where those of a dict
    are of one class. Of a model without such members: the outermost modules with submodules whose class repeats.
    """
    in_containers = list(_members_of_containers(module))
    return iter(in_containers or _outermost_of_repeated_classes(module))


def _members_of_containers(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    blocks = {child for child in children if _can_be_block(child)}
    is_dict_of_blocks = isinstance(module, nn.ModuleDict) and len(blocks) > 1 and len(set(map(type, blocks))) == 1
    if isinstance(module, nn.ModuleList | nn.Sequential) or is_dict_of_blocks:
        for child in children if blocks else ():
            if child in blocks:
                yield child
            elif not _can_be_called(child):
                yield from _members_of_containers(child)
        if blocks:
            return
    for child in children:
        yield from _members_of_containers(child)


def _outermost_of_repeated_classes(module: nn.Module) -> Iterator[nn.Module]:
    """Without containers, whose class says nothing about their members."""
    containers = nn.ModuleList, nn.ModuleDict, nn.Sequential
    parts = [p for p in module.modules() if p is not module and _can_be_block(p) and not isinstance(p, containers)]
    counts, inside = Counter(map(type, parts)), set[nn.Module]()
    for part in parts:
        if counts[type(part)] > 1 and part not in inside:
            yield part
            inside.update(part.modules())


def _can_be_block(module: nn.Module) -> bool:
    has_parts, has_parameters = any(True for _ in module.children()), any(True for _ in module.parameters())
    return has_parts and has_parameters and _can_be_called(module)


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward, as lists and dicts of modules have not."""
    return getattr(type(module), "forward", None) is not nn.Module.forward  # traced modules have it on themselves only
