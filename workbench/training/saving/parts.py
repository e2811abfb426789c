"""The parts of a checkpoint: modules, optimizers, objects with state, plain values, and the random state."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workbench.errors import CheckpointError
from workbench.tensors import default_generator
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.program_state import random_states, set_random_states
from workbench.tensors.tensor_state import count_write, forget_derived
from workbench.tensors.world import World
from workbench.training.saving import optimizers
from workbench.training.saving.flat import Path, flatten, name_of
from workbench.training.saving.plain_copies import checksum
from workbench.training.saving.reading import Checkpoint, shape_of

RANDOM = "random"
"""The part with the generator of keys, which all ranks have alike, and each rank's others; every checkpoint has it."""
_RANKS = "ranks"


def kind_of(value: Any) -> str:
    """``"module"``, ``"optimizer"``, ``"stateful"`` (has state_dict and load_state_dict) or ``"value"``."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "stateful" if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else "value"


def described(parts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What a manifest says of parts: the kinds of all, and the classes of learning-rate schedulers."""
    schedulers = {part: type(value).__qualname__ for part, value in parts.items() if isinstance(value, LRScheduler)}
    return {"parts": {part: kind_of(value) for part, value in parts.items()}, "schedulers": schedulers}


def is_extra(path: Path) -> bool:
    """Whether an entry is of what ``set_extra_state`` of a module takes, as a whole."""
    return len(path) > 1 and str(path[1]).rpartition(".")[2] == "_extra_state"


def collect(parts: Mapping[str, Any], world: World) -> tuple[dict[Path, Any], dict[str, str]]:
    """The leaves of all parts, and for each other name of a tied tensor the name of its entry."""
    leaves: dict[Path, Any] = {}
    aliases: dict[str, str] = {}
    for part, value in parts.items():
        if part == RANDOM:
            raise CheckpointError(f"save({part}=...): {RANDOM!r} is the name of the random state. Choose another name.")
        found, tied = leaves_of(part, value, parts)
        leaves |= found
        aliases |= tied
    random = {"generator": _generator(world).get_state(), _RANKS: {str(world.rank): _state_of_rank(world)}}
    return leaves | flatten({RANDOM: random}), aliases


def leaves_of(part: str, value: Any, parts: Mapping[str, Any]) -> tuple[dict[Path, Any], dict[str, str]]:
    """The leaves of one of the parts, and for each other name of its tied tensors the name of the entry."""
    leaves = flatten({part: _state_of(part, value, parts)})
    if kind_of(value) != "module":
        return leaves, {}
    leaves.pop((part,), None)  # of a module without tensors
    return leaves, _drop_tied(leaves)


def sum_terms(leaves: Mapping[Path, Any], parts: Mapping[str, Any]) -> dict[Path, Any]:
    """The leaves, with sums in place of terms in the state of optimizers: files hold no terms. All ranks call it.

    LBFGS keeps the gradient of its newest step, as it is.
    """
    with torch.no_grad():
        return {
            path: box(value, value._spec.layout.without_terms())
            if isinstance(value, GlobalTensor) and isinstance(parts.get(str(path[0])), Optimizer)
            else value
            for path, value in leaves.items()
        }


def checksums(leaves: Mapping[Path, Any], parts: Mapping[str, Any]) -> dict[str, int]:
    """Checksums, by name, of the leaves of which all ranks must have the same copy: one is saved.

    These are the parameters of modules, and the tensors of objects with state, of values, and of what an optimizer
    keeps beside the state of parameters. Plain buffers may differ, and the state of a parameter is that of the ranks
    that hold it.
    """
    found: dict[str, int] = {}
    for path, value in leaves.items():
        part = parts.get(str(path[0]))
        is_one_for_all = isinstance(value, nn.Parameter) if isinstance(part, nn.Module) else path[0] in parts
        is_of_parameter = isinstance(part, Optimizer) and path[-1] != optimizers.OWN
        if is_one_for_all and not is_of_parameter and (number := checksum(value)) is not None:
            found[name_of(path)] = number
    return found


def _generator(world: World) -> torch.Generator:
    return world.context.generator or torch.default_generator


def _state_of_rank(world: World) -> bytes:
    """The states of the generators of this rank's GPU, of Python and of numpy."""
    _, *of_gpu, of_python, of_numpy = random_states(world.device)
    return pickle.dumps(([state.numpy() for state in of_gpu], of_python, of_numpy))


def _state_of(part: str, value: Any, parts: Mapping[str, Any]) -> Any:
    kind = kind_of(value)
    if kind == "module":
        return dict(value.state_dict(keep_vars=True))
    if kind == "optimizer":
        return optimizers.state_of(value, names_in(parts), part)
    return value.state_dict() if kind == "stateful" else value


def _drop_tied(leaves: dict[Path, Any]) -> dict[str, str]:
    """Keep every tensor of a module under its first name; returns other names -> first name."""
    first: dict[int, Path] = {}
    aliases = {}
    for path, value in list(leaves.items()):
        is_entry = len(path) == 2 and isinstance(value, torch.Tensor)  # deeper ones are of an extra state
        if is_entry and first.setdefault(id(value), path) != path:
            aliases[name_of(path)] = name_of(first[id(value)])
            del leaves[path]
    return aliases


def names_in(parts: Mapping[str, Any]) -> dict[int, str]:
    """Names of the parameters of all modules, by id. With several modules, each name begins with that of the first part
    that has the parameter.
    """
    modules = {part: value for part, value in parts.items() if isinstance(value, nn.Module)}
    is_one = len({*map(id, modules.values())}) == 1
    return {
        id(parameter): name if is_one else f"{part}.{name}"
        for part, module in reversed(modules.items())
        for name, parameter in module.named_parameters()
    }


class Restoring:
    """Loads a checkpoint into ``parts``: ``problems_of``, ``targets``, ``load_objects``, ``assign``, ``values``."""

    def __init__(self, parts: Mapping[str, Any], checkpoint: Checkpoint, world: World, strict: bool) -> None:
        self.parts, self.checkpoint, self.world, self.strict = parts, checkpoint, world, strict
        self.names = names_in(parts) | self._saved_names()
        self.filled: dict[Path, torch.Tensor] = {}
        self._in_values: dict[Path, torch.Tensor] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def _saved_names(self) -> dict[int, str]:
        """The names of parameters in the saved state of optimizers, which had one module beside it or several."""
        saved = {
            name
            for part, value in self.parts.items()
            if isinstance(value, Optimizer)
            for name in optimizers.saved_names(value, part, self.checkpoint)
        }
        found: dict[int, str] = {}
        for part, value in self.parts.items():
            if isinstance(value, nn.Module) and self.checkpoint.below(part):
                own = dict(value.named_parameters())
                prefix = max(("", f"{part}."), key=lambda prefix: sum(f"{prefix}{name}" in saved for name in own))
                found |= {id(p): f"{prefix}{name}" for name, p in own.items() if f"{prefix}{name}" in saved}
        return found

    def problems_of(self, part: str) -> list[str]:
        """The mismatches of one part, one line each; empty if it fits."""
        value = self.parts[part]
        if not self.checkpoint.below(part) and part not in self.checkpoint.kinds:
            return [f"{part}: not in {self.checkpoint.title}, which holds {', '.join(sorted(self.checkpoint.kinds))}"]
        if isinstance(value, nn.Module):
            return self._module_problems(part, value)
        if isinstance(value, Optimizer):
            return optimizers.problems(value, self.names, part, self.checkpoint, self.strict)
        if kind_of(value) == "value":
            return self._value_problems(part, value)
        saved, own = self.checkpoint.schedulers.get(part), type(value).__qualname__
        differs = self.strict and saved not in (None, own)  # older files, and torch's, have none
        return [f"{part}: {saved} in {self.checkpoint.title}, {own} in what it is loaded into"] if differs else []

    def _module_problems(self, part: str, module: nn.Module) -> list[str]:
        ours, names = module.state_dict(keep_vars=True), self._names_now(part, module)
        there = set(names.values())
        known = {id(value) for name, value in ours.items() if name in there}
        missing = [name for name, value in ours.items() if name not in there and id(value) not in known]
        unexpected = [name for name, now in names.items() if now not in ours]
        tensors: dict[Path, torch.Tensor] = {
            (part, name): ours[now]
            for name, now in names.items()
            if isinstance(ours.get(now), torch.Tensor) and not is_extra((part, now))
        }
        shapes = [text.removeprefix(f"{part}.") for text in self._other_shapes(tensors, "the model")]
        is_dry = self.world.device.type == "meta"
        on_meta = [name_of(path[1:]) for path, tensor in tensors.items() if tensor.is_meta and not is_dry]
        return self._listed(part, missing, unexpected, shapes, on_meta)

    def _names_now(self, part: str, module: nn.Module) -> dict[str, str]:
        """The names of a module's entries in the checkpoint, with their names in the module: its hooks for
        ``load_state_dict`` know the names that older versions gave.
        """
        below, ours = self.checkpoint.below(part), module.state_dict(keep_vars=True)
        names = {str(path[0]): str(path[0]) for path in below}
        if all(name in ours for name in names):
            return names
        state: dict[str, Any] = {
            str(path[0]): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for path, entry in below.items()
            if len(path) == 1 and self.checkpoint.is_tensor((part, *path))
        }
        given = {id(value): name for name, value in state.items()}
        for where, each in module.named_modules():
            for hook in each._load_state_dict_pre_hooks.values():
                hook(state, f"{where}." if where else "", {}, True, [], [], [])
        return names | {given[id(value)]: now for now, value in state.items() if now in ours and id(value) in given}

    def _value_problems(self, part: str, value: Any) -> list[str]:
        tensors = {path: leaf for path, leaf in flatten({part: value}).items() if isinstance(leaf, torch.Tensor)}
        missing = [name_of(path) for path in tensors if path not in self.checkpoint.entries]
        return self._listed(part, missing, [], self._other_shapes(tensors, "the value"), [])

    def _other_shapes(self, tensors: Mapping[Path, torch.Tensor], whose: str) -> list[str]:
        """What is said of tensors whose entries have other shapes."""
        found = []
        for path, tensor in tensors.items():
            if (entry := self.checkpoint.entries.get(path)) is not None:
                saved = str(tuple(entry.size)) if self.checkpoint.is_tensor(path) else "no tensor"
                if saved != str(shape_of(tensor)):
                    found.append(
                        f"{name_of(path)} is {saved} in {self.checkpoint.title}, {shape_of(tensor)} in {whose}"
                    )
        return found

    def _listed(
        self, part: str, missing: list[str], unexpected: list[str], shapes: list[str], on_meta: list[str]
    ) -> list[str]:
        without_storage = 'on meta; wb.parallelize(module, strategy, init="empty") or module.to_empty() gives storage'
        listed = [("of another shape", shapes), (without_storage, on_meta)]
        if self.strict:
            listed = [(f"missing in {self.checkpoint.title}", missing), ("unexpected", unexpected), *listed]
        return [f"{part}: {len(some)} {text}: {', '.join(some)}" for text, some in listed if some]

    def targets(self) -> Iterator[tuple[Path, torch.Tensor]]:
        """(path in the checkpoint, tensor to fill) for everything that is read in slices."""
        for part, value in self.parts.items():
            if isinstance(value, nn.Module):
                yield from self._module_targets(part, value)
            elif isinstance(value, Optimizer):
                self.filled.update(optimizers.targets(value, self.names, part, self.checkpoint))
                yield from ((path, tensor) for path, tensor in self.filled.items() if path[0] == part)
            elif kind_of(value) == "value":
                for path, leaf in flatten({part: value}).items():
                    if isinstance(leaf, torch.Tensor) and path in self.checkpoint.entries:
                        self._in_values[path] = leaf
                        yield path, leaf

    def _module_targets(self, part: str, module: nn.Module) -> Iterator[tuple[Path, torch.Tensor]]:
        seen: set[int] = set()
        state = self._states[part] = module.state_dict(keep_vars=True)
        for name, now in self._names_now(part, module).items():
            path, value = (part, name), state.get(now)
            is_there = path in self.checkpoint.entries and self.checkpoint.is_tensor(path)
            if isinstance(value, torch.Tensor) and is_there and id(value) not in seen and not is_extra((part, now)):
                seen.add(id(value))
                yield path, value

    def load_objects(self) -> None:
        """Give objects with state what was saved. They come first: what they refuse, they refuse before anything is
        filled.
        """
        for part, value in self.parts.items():
            if kind_of(value) == "stateful":
                saved = self.checkpoint.value(part)
                value.load_state_dict({} if saved is None else saved)

    def assign(self) -> None:
        """When the targets are filled: set everything that is not a tensor."""
        for part, value in self.parts.items():
            if isinstance(value, nn.Module):
                self._assign_module(part, value)
            elif isinstance(value, Optimizer):
                optimizers.assign(value, self.names, part, self.checkpoint, self.filled)
        with local_torch():
            for tensor in self._in_values.values():
                if isinstance(tensor, GlobalTensor):
                    count_write(tensor)  # also on ranks that have read nothing: all keep boxings as long

    def values(self) -> dict[str, Any]:
        """The plain values that were saved, with the filled tensors in them."""
        values = [part for part, kind in self.checkpoint.kinds.items() if kind == "value" and part not in self.parts]
        values += [part for part, value in self.parts.items() if kind_of(value) == "value"]
        return {part: self.checkpoint.value(part, given=self._in_values) for part in values}

    def _assign_module(self, part: str, module: nn.Module) -> None:
        """Set what is no tensor, and load the module's state where its entries are copies of what it uses."""
        state, loaded = self._states[part], dict[str, Any]()
        own = {id(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
        for name, now in self._names_now(part, module).items():
            if now in state and is_extra((part, now)):
                module.get_submodule(now.rpartition(".")[0]).set_extra_state(self.checkpoint.value(part, name))
            elif now in state:
                value = state[now]
                loaded[now] = value if isinstance(value, torch.Tensor) else self.checkpoint.value(part, name)
        if any(id(value) not in own for value in loaded.values()):
            module.load_state_dict(loaded, strict=False)
        for tensor in state.values():
            if isinstance(tensor, GlobalTensor):
                forget_derived(tensor)

    def assign_random_state(self) -> None:
        """Restore the random numbers of the moment of saving. A rank that was not there goes on from what all ranks had
        alike, and else keeps its own generators of Python, of numpy and of its GPU.
        """
        if not self.checkpoint.below(RANDOM):
            return
        _generator(self.world).set_state(self.checkpoint.value(RANDOM, "generator"))
        saved, own = [rank for (rank,) in self.checkpoint.below(RANDOM, _RANKS)], str(self.world.rank)
        states = {self.checkpoint.value(RANDOM, _RANKS, rank) for rank in ([own] if own in saved else saved)}
        if len(states) == 1:
            of_gpu, *others = pickle.loads(states.pop())
            of_cpu, *present = default_generator.states(self.world.device)
            of_gpu = [torch.from_numpy(state) for state in of_gpu[: len(present)]]  # a CPU has none of its own
            set_random_states([of_cpu, *of_gpu, *others], self.world.device)
