"""Brings back what replaced ranks have lost. Set-up cells make everything anew on all ranks, then values return:

* modules, optimizers, objects with state, and global tensors that have changed: from the copies that ranks still hold
  (`peer_copies`), or else from the newest checkpoint of this session;
* values that set-up cells do not make, or that have changed since: each rank keeps its own. A replaced rank gets it if
  the others have equal ones;
* anything else is as its set-up cell makes it, or lost.

Where all ranks were replaced, all that they hold has been made since, and is kept. A checkpoint is loaded for the rest,
unless it has modules or optimizers that they hold.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.errors import CheckpointError, SessionError
from workbench.session import user_modules
from workbench.session.on_engine import completion as engine_assist
from workbench.session.on_engine.sent_values import is_same, kind, pack, renewed, shown, spread, unpack, with_own_state
from workbench.session.on_engine.shell import send, shell
from workbench.session.processes.folder import SessionFolder
from workbench.session.protocol import SavedCheckpoint
from workbench.session.ranks import describe_ranks
from workbench.tensors import default_generator
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current
from workbench.training.saving import store
from workbench.training.saving.peer_copies import PeerCopies
from workbench.training.saving.reading import Checkpoint, find

Rows = list[tuple[str, str]]
"""(variable, where its value came from, or that it is lost and why)."""
_NO_SETUP = "lost: no set-up cell makes it"
_KEPT = "kept: the ranks hold it; no checkpoint is loaded over it"
_DIFFERS = "it differs between the other ranks"
_PARTS = ("module", "optimizer", "stateful", "global tensor")
_kept: tuple[int, dict[str, Any], Any] | None = None
"""The number of the loss, the variables at that time, and the random states."""


def keep(loss: int, lost: Collection[int]) -> list[str]:
    """Keep this rank's variables while set-up cells run. Those of one loss are kept once, until they are restored, as
    the user may run set-up cells by hand meanwhile; where all ranks are new, those of now.

    Returns:
        Names of modules and optimizers, which only set-up cells can make on other ranks.
    """
    global _kept
    variables, world = shell().user_ns, current()
    now, are_all_new = {name: variables[name] for name in engine_assist.names()}, len(lost) == world.world_size
    if _kept is None or _kept[0] != loss or are_all_new:
        _kept = (loss, now, _random_states(world))
        user_modules.import_edited_anew()  # as new ranks do
    elif world.rank not in lost:
        _kept = (loss, now | _kept[1], _kept[2])
    parts = () if are_all_new else spread(_kept[1]).items()
    return sorted(name for name, value in parts if kind(value) in ("module", "optimizer"))


def put_back() -> None:
    """Let the variables be those from before the set-up cells, of which one has failed. A replaced rank gets none:
    cells that read them are refused, as before.
    """
    if _kept is not None:
        namespace = shell().user_ns
        for name in set(engine_assist.names()) - _kept[1].keys():
            del namespace[name]
        namespace.update(_kept[1])


def restore(lost: Collection[int], saved: Sequence[SavedCheckpoint]) -> Rows:
    """Bring back the variables of lost ranks, when set-up cells have run. All ranks call it.

    Args:
        saved: the checkpoints of this session, oldest first.
    """
    global _kept
    _, kept, states = _kept if _kept is not None else (0, {}, None)
    namespace = shell().user_ns
    fresh = {name: namespace[name] for name in engine_assist.names()}
    rows = Recovery(namespace, fresh, kept, lost, current(), saved).run(states)
    _kept = None
    return rows


def record_checkpoint(path: Path, parts: Mapping[str, Any]) -> None:
    """Remember a checkpoint for all engines of this session: in its folder, which is also there when the notebook is
    gone; engines of a profile, which may be on other hosts, tell the notebook.
    """
    if current().rank != 0:
        return
    variables = spread({name: shell().user_ns[name] for name in engine_assist.names()})
    names = {
        part: [name for name, other in variables.items() if other is value]
        for part, value in parts.items()
        if kind(value) != "value"
    }
    saved = SavedCheckpoint(str(path), names)
    if folder := os.environ.get("WORKBENCH_SESSION_FOLDER"):
        SessionFolder(Path(folder)).add_checkpoint(saved)
    else:
        send(saved)


class _Told(NamedTuple):
    """What a rank tells the others about a variable: its kind before, its kind after set-up, whether these differ."""

    kept: str
    fresh: str
    has_changed: bool


class _ToldValue(NamedTuple):
    """What a rank tells the others about a value that one rank has sent: whether it had it, whether its set-up cells
    make it, and why the sent one is of no use.
    """

    is_kept: bool
    is_made: bool
    problem: str


class Recovery:
    """One rank's part of a recovery.

    Args:
        namespace: the variables of this rank, to be set.
        fresh: those that set-up cells may have made.
        kept: this rank's variables before set-up cells ran.
        lost: the ranks that were replaced. If these are all, what they hold is kept.
        checkpoints: those of this session, oldest first.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: Mapping[str, Any],
        kept: Mapping[str, Any],
        lost: Collection[int],
        world: World,
        checkpoints: Sequence[SavedCheckpoint] = (),
    ) -> None:
        self.namespace, self.fresh, self.world, self.checkpoints = namespace, spread(fresh), world, checkpoints
        self.are_all_new = len(lost) == world.world_size
        lost = () if self.are_all_new else lost
        self.is_lost = world.rank in lost
        self.kept = {} if self.is_lost else {name: renewed(value, namespace) for name, value in spread(kept).items()}
        self.holders = [rank for rank in range(world.world_size) if rank not in lost]
        self.rows: dict[str, str] = {}

    def run(self, random_states: Any) -> Rows:
        """Set the variables. Returns what became of each, equal on all ranks. All ranks call it."""
        told = self._gather({name: self._tell(name) for name in {*self.kept, *self.fresh}})
        self._refuse_models_without_setup(told)
        nothing = _Told("", "", False)
        parts, values, absent = list[str](), list[str](), list[str]()
        for name in sorted({name for each in told for name in each}):
            said = [each.get(name, nothing) for each in told]
            kinds, made = {said[rank].kept for rank in self.holders}, {each.fresh for each in said}
            must_return = "" in made or any(each.has_changed for each in said)
            is_part, is_alike = kinds <= set(_PARTS) and made <= {*_PARTS, ""}, len(kinds | made) == 1
            if kinds == {""}:
                absent += [name] if len(made) == 1 and made <= set(_PARTS) else []
            elif not self.are_all_new and ((is_part and not is_alike) or ("." in name and "" in made)):
                self.rows[name] = _NO_SETUP
            elif must_return:
                (parts if is_part and is_alike else values).append(name)
        begins_anew = not parts and (self.are_all_new or bool(absent))
        same = {name: other for name, other in self._names_of_the_same(parts + absent).items() if name != other}
        loaded = self._restore_parts(*([name for name in names if name not in same] for names in (parts, absent)))
        self.rows |= {name: self.rows[other] for name, other in same.items()}
        self._restore_values([name for name in values if name not in loaded])
        if not begins_anew:  # else as set-up cells seed them, or the checkpoint
            self._restore_random(random_states, was_loaded=bool(loaded))
        return sorted(self.rows.items())

    def _tell(self, name: str) -> _Told:
        kept, fresh = (kind(of[name]) if name in of else "" for of in (self.kept, self.fresh))
        has_same = bool(kept and fresh) and is_same(self.kept[name], self.fresh[name])
        return _Told(kept, fresh, bool(kept) and not has_same)

    def _names_of_the_same(self, names: Sequence[str]) -> dict[str, str]:
        """Each name with the first name of the same object, where all ranks give it that: ``net`` is ``model``."""
        found = self._gather({name: next(n for n in names if self.fresh[n] is self.fresh[name]) for name in names})
        return {name: first for name, first in found[0].items() if all(each[name] == first for each in found)}

    def _gather(self, value: Any) -> list[Any]:
        return all_gather_object(value, self.world, "recover")

    # Parts.

    def _restore_parts(self, held: Sequence[str], absent: Sequence[str]) -> Collection[str]:
        """Fill modules, optimizers and their like; returns the names of everything that came from a checkpoint."""
        parts = {name: self.fresh[name] for name in [*held, *absent]}
        copies = PeerCopies({name: self.kept[name] for name in held if name in self.kept}, self.world)
        lost = copies.compare({name: parts[name] for name in held})
        differing: Sequence[str] = ()
        if self.are_all_new:  # an optimizer or a schedule is kept with what it refers to
            differing = held if any(kind(parts[name]) in ("optimizer", "stateful") for name in lost) else list(lost)
        elif copies.unlike:
            _refuse_other_parts(copies.unlike)
        made = {id(parts[name]) for name in differing}  # where set-up cells make another one
        for name in (name for name in self.kept if id(self.fresh.get(name)) in made):
            self._set(name, self.kept[name])
        lost = {name: why for name, why in lost.items() if name not in differing}
        is_whole = not lost
        lost |= dict.fromkeys(absent, "no rank has a copy of it")
        loaded = self._load_checkpoint(parts, lost, held if is_whole else ()) if lost else ()
        chosen = [name for name in held if name not in lost and name not in loaded and name not in differing]
        copies.restore(parts, chosen)
        for name in chosen:
            broken = "; the copies differed, as a step broke off" if name in copies.differing else ""
            self.rows[name] = f"{describe_ranks(copies.givers(name) or self.holders[:1])}{broken}"
        if self.are_all_new:
            self.rows |= dict.fromkeys(held, _KEPT)
        for name, why in lost.items():
            self.rows.setdefault(name, f"lost: {why}; it is as its set-up cell makes it")
        return loaded

    def _refuse_models_without_setup(self, told: Sequence[Mapping[str, _Told]]) -> None:
        """Raise SessionError, on all ranks, if set-up cells leave models or optimizers out that ranks hold."""
        made = {name for rank, each in enumerate(told) if rank not in self.holders for name in each}
        same = [name for name, value in self.kept.items() if self.fresh.get(name, value) is value and name not in made]
        found = self._gather(with_own_state(same, self.kept) if len(self.holders) < len(told) else [])
        if any(found):
            raise SessionError(
                f"recover: no set-up cell makes {', '.join(sorted(set().union(*found)))}, and a rank that was replaced "
                f"lacks this, so nothing is recovered yet, and all is kept. Run the cells that made it with %%global "
                f"--setup, then %workbench recover once more. To give it up: set it to None in such a cell."
            )

    def _load_checkpoint(
        self, parts: Mapping[str, Any], lost: dict[str, str], held: Collection[str]
    ) -> Collection[str]:
        """Load the newest checkpoint that has all that is lost, or else some of it, and none of the parts that ranks
        hold; ``lost`` says why there is none.
        """
        path, saved = self._gather(self._newest(parts, set(lost), set(held)) if self.world.rank == 0 else None)[0]
        if path is None:
            alone = f" without {', '.join(held)}" if held and self.checkpoints else ""
            lost.update({name: f"{why}, and no checkpoint of this session has it{alone}" for name, why in lost.items()})
            return ()
        try:
            values = store.load(path, **{part: parts[name] for part, name in saved.items()})
        except CheckpointError as error:
            lost.update({name: f"{why}; {error}" for name, why in lost.items()})
            return ()
        known = {name for each in self._gather({*self.kept, *self.fresh}) for name in each}
        values = {name: value for name, value in values.items() if name in known and name not in saved}
        self.namespace.update(values)
        for name in [*saved.values(), *values]:
            self.rows[shown(name, values.get(name))] = f"checkpoint {path}"
            lost.pop(name, None)
        return [*saved.values(), *values]

    def _newest(
        self, parts: Collection[str], lost: Collection[str], held: Collection[str]
    ) -> tuple[Path | None, dict[str, str]]:
        """The newest complete checkpoint that has all that is lost, or else some of it, and nothing that is held; and
        its parts' variables.
        """
        some: tuple[Path | None, dict[str, str]] = (None, {})
        for each in reversed(self.checkpoints):
            path, names = Path(each.path), each.names
            try:
                kinds = Checkpoint(find(path)).kinds
            except CheckpointError:
                continue  # broken off, damaged, or removed since
            saved = {part: name for part in kinds for name in parts if name in (names.get(part) or [part])}
            if set(saved.values()) & set(held):
                continue
            if set(saved.values()) >= set(lost):
                return path, saved
            some = (path, saved) if some[0] is None and set(saved.values()) & set(lost) else some
        return some

    # Values.

    def _restore_values(self, names: Collection[str]) -> None:
        """Ranks keep their own values; lost ranks get those on which the others agree."""
        if self.are_all_new:
            for name in names:
                if name in self.kept:
                    self._set(name, self.kept[name])
            self.rows |= dict.fromkeys(names, _KEPT)
            return
        giver = min(self.holders)
        own = {
            name: pack(self.kept[name], self.namespace)
            for name in names
            if self.world.rank == giver and name in self.kept
        }
        sent, names_shown = self._gather((own, {name: shown(name, self.kept[name]) for name in own}))[giver]
        unpacked, problems = self._unpack(sent)
        told = self._gather(
            {name: _ToldValue(name in self.kept, name in self.fresh, problems.get(name, "")) for name in names}
        )
        for name in names:
            having = [rank for rank in self.holders if told[rank][name].is_kept]
            problem = next((each[name].problem for each in told if each[name].problem), "")
            row = describe_ranks([giver])
            if having != self.holders:
                row = f"lost: only {describe_ranks(having)} had it"
            elif problem and problem != _DIFFERS and all(each[name].is_made for each in told):
                row = f"as its set-up cell makes it: {problem}"
            elif problem:
                row = f"lost: {problem}"
            elif self.is_lost:
                self._set(name, unpacked[name])
            if name in self.kept and problem in ("", _DIFFERS):
                self._set(name, self.kept[name])
            self.rows[names_shown.get(name, name)] = row

    def _set(self, name: str, value: Any) -> None:
        owner, _, attribute = name.partition(".")
        if attribute:
            setattr(self.namespace[owner], attribute, value)
        else:
            self.namespace[name] = value

    def _unpack(self, sent: Mapping[str, bytes | str]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values that were sent, and why others are of no use."""
        values: dict[str, Any] = {}
        problems = {name: data for name, data in sent.items() if isinstance(data, str)}
        for name, data in sent.items():
            try:
                if not isinstance(data, str):
                    values[name] = unpack(data, self.namespace)
            except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
                problems[name] = f"it cannot be unpickled ({type(error).__name__}: {error})"
        for name, value in values.items():
            if name in self.kept and self.world.rank != min(self.holders) and not is_same(self.kept[name], value):
                problems[name] = _DIFFERS
        return values, problems

    def _restore_random(self, states: Any, was_loaded: bool) -> None:
        """Let random numbers go on as if nothing had happened, or from where a checkpoint left them."""
        found = self._gather(None if self.is_lost else states)
        of_torch, others = {rank: found[rank][0] for rank in self.holders}, found[self.holders[0]][1]
        source = default_generator.source_of(self.world.rank, {rank: states[0] for rank, states in of_torch.items()})
        if not was_loaded and source in of_torch:
            _set_torch_states(of_torch[source], self.world)
        if not self.is_lost:
            _set_other_states(states[1])
        elif all(found[rank][1] == others for rank in self.holders):
            _set_other_states(others)


def _refuse_other_parts(unlike: Mapping[str, str]) -> None:
    told = "; ".join(f"{name}: {how}" for name, how in sorted(unlike.items()))
    raise SessionError(
        f"recover: set-up cells make other parts than the ranks hold. {told}. So a rank that was replaced cannot get "
        f"what the others hold: nothing is recovered yet, and all is kept. Run the cells that made the present ones "
        f"with %%global --setup, then %workbench recover once more. To give these up: %workbench restart."
    )


def _random_states(world: World) -> tuple[list[torch.Tensor], bytes]:
    """torch's random states, and those of Python and numpy."""
    own = world.context.generator
    of_torch = [own.get_state()] if own is not None else default_generator.states(world.device)
    numpy = sys.modules.get("numpy.random")
    return of_torch, pickle.dumps((random.getstate(), numpy.get_state() if numpy is not None else None))


def _set_torch_states(states: list[torch.Tensor], world: World) -> None:
    if world.context.generator is not None:
        world.context.generator.set_state(states[0])
    else:
        default_generator.set_states(states, world.device)


def _set_other_states(states: bytes) -> None:
    of_python, of_numpy = pickle.loads(states)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy.random"].set_state(of_numpy)
