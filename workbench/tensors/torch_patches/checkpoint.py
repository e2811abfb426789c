"""``torch.utils.checkpoint`` on global tensors: recomputation begins at the same point of the backward on every rank.

torch recomputes when a rank first needs a saved tensor, and stops when that rank has all saved tensors. Ranks need
different ones (a placeholder needs none), so one rank would recompute, with its boxings, while another continues. Here
the first saved tensor is a token, the trigger. The last nodes of the function read it, and the recomputation runs to
its end.

Past the last saved tensor the function may write in place to one of them, which torch's recomputation does not reach.
So a saved tensor knows its version, and such a write is torch's error.

Where a step computes gradients of inputs and of weights apart, the first part recomputes. What functions read there
that the second part asks again is kept for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.errors import StrategyError
from workbench.tensors.boxing.box import keep_boxing, kept_boxings
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, plain, wrap
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.kept_for_backward import Kept, unchanged
from workbench.tensors.patch_table import patch
from workbench.tensors.world import World, joined

_original: Callable[..., Any] = torch_checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]


_CHECK = "default, of shards"
_OPTIONS = frozenset(
    {
        "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
        "respect_saved_tensors_hooks",
    }
)  # fmt: skip
"""Keywords of ``checkpoint`` itself; all others are the function's."""


def _metadata_of_shard(tensor: torch.Tensor) -> Any:
    """What torch compares between forward and recomputation; a global tensor would tell its logical shape."""
    with local_torch():
        return torch_checkpoint._default_meta_extractor(tensor)


class _Saver(torch.autograd.Function):
    """Saves tensors for backward."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*(tensors or (token,)))
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def _saver_of(world: World, *tensors: torch.Tensor) -> torch.Tensor:
    """A tensor whose node has saved these tensors, or a token."""
    made: torch.Tensor = _Saver.apply(torch.zeros((), device=world.device, requires_grad=True), *tensors)
    return made


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``; in a world of several ranks, on the terms above.

    It recomputes without re-entering the engine whatever ``use_reentrant`` says: a reentrant checkpoint would hand
    gradients on as plain terms.
    """
    world = joined()
    if world is None:
        return _original(function, *args, **kwargs)
    if world.world_size == 1 and not _is_global(function, args, kwargs):
        alike = _drawing_alike(function, world) if kwargs.get("preserve_rng_state", True) else function
        return _original(alike, *args, **kwargs)
    if world.context.running is not None and world.context.running.observer is not None:
        world.context.running.observer.recomputes = True
    options = {**kwargs, "use_reentrant": False, "early_stop": False}
    if options.get("determinism_check", "default") == "default":
        options["determinism_check"] = _CHECK
    triggers: list[torch.Tensor | None] = []
    arrivals: list[_Arrivals] = []
    errors: list[BaseException] = []
    call = world.context.call
    given = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    with local_torch():
        specs = [
            (leaf._spec, leaf.is_leaf) if isinstance(leaf, GlobalTensor) else None
            for leaf in tree_leaves((args, given))
        ]
    random_state = _generator_state(world) if kwargs.get("preserve_rng_state", True) else None

    def with_trigger(*inputs: Any, **named: Any) -> Any:
        trigger = _saver_of(world)
        if not triggers:
            triggers.append(trigger)
            try:
                with _checking_writes(), _keeping_operands(world.context.running):
                    return function(*inputs, **named)
            except BaseException as error:  # noqa: BLE001 - raised below: torch before 2.13 would keep its hooks entered
                errors.append(error)
                return None
        if world.context.running is not None:
            world.context.running.refuse_second_recomputation()
        with hidden_from_modes():
            inputs, named = _wrapped(specs, arrivals, inputs, named)
        with _drawing_from(random_state, world), world.context.temporarily(call=call), _recording_versions():
            return function(*inputs, **named)

    boxings = None if world.context.running is None else world.context.running.boxings
    num_uses = -1 if boxings is None else boxings.num_uses
    result = _original(with_trigger, *args, **options)
    # The trigger's saved tensors keep this function alive, so the function must not hold the trigger.
    trigger, triggers[0] = triggers[0], None
    if errors:
        raise errors.pop()
    if trigger is not None and trigger.requires_grad:
        _start_at_the_end(result, trigger, world)
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            arrivals.append(_Arrivals(args, world, num_uses))
    return result


class _Arrivals:
    """Arguments of a function that its first run has boxed from other ranks, saved like the arguments.

    A saved argument comes back as the object that it was, with the boxings that it keeps, but through hooks of saved
    tensors (an offload, a meter of memory) as a new one. The second run would wait for the stage before to send again;
    in a V this may be a stage of the same rank, which has its turn later.
    """

    def __init__(self, args: Any, world: World, after: int) -> None:
        found = [
            (position, boxed)
            for position, leaf in enumerate(tree_leaves(args))
            if isinstance(leaf, GlobalTensor)
            for boxed in kept_boxings(leaf, after)
            if boxed._spec.layout.placement != leaf._spec.layout.placement
        ]
        self._places = [(position, boxed._spec) for position, boxed in found]
        self._saver = _saver_of(world, *(plain(boxed) for _, boxed in found)) if found else None

    def give_back(self, leaves: list[Any], new: list[int]) -> None:
        """Let the arguments that are new, by position, keep these boxings."""
        if self._saver is not None:
            for (position, spec), shard in zip(self._places, _node(self._saver).saved_tensors, strict=True):
                if position in new:
                    leaf = leaves[position]
                    keep_boxing(leaf, _made_global(shard, spec, False, leaf.requires_grad))


class _Saved:
    """What a checkpoint has put in the place of a saved tensor, and the tensor while the second part needs it."""

    __slots__ = ("in_place", "kept")

    def __init__(self, in_place: Any) -> None:
        self.in_place = in_place
        self.kept: torch.Tensor | None = None


def _keeping_operands(running: Any) -> AbstractContextManager[Any]:
    """Context around the first run of a function, inside a checkpoint's hooks of saved tensors, which it extends."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if running is None or not running.splits_backward or hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def unpack_or_keep(saved: _Saved) -> torch.Tensor:
        tensor = unpack(saved.in_place) if saved.kept is None else saved.kept
        if running.computes_weights:
            saved.kept = None
        elif running.keeps_operands:
            saved.kept = tensor
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(pack(tensor)), unpack_or_keep)


_ADVICE = (
    " A checkpoint (recompute) runs its function to the end again before backward reads what was saved. Compute a new "
    "tensor: h = h * 2 in place of h.mul_(2)."
)


def _recording_versions() -> AbstractContextManager[Any]:
    """Context around the second run of a function, whose saved tensors record their versions."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def pack_recorded(tensor: torch.Tensor) -> Any:
        with local_torch(), torch.no_grad(), hidden_from_modes():
            alone: Any = tensor.detach()  # an object of its own, which the checkpoint keeps as it is
            alone.version_when_saved = alone._version
        return pack(alone)

    return torch.autograd.graph.saved_tensors_hooks(pack_recorded, unpack)


def _checking_writes() -> AbstractContextManager[Any]:
    """Context around the first run of a function: what backward reads must have the version of the second run."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def unpack_checked(saved: Any) -> torch.Tensor:
        tensor: torch.Tensor = unpack(saved)
        version: int | None = getattr(tensor, "version_when_saved", None)
        return tensor if version is None else unchanged(Kept(tensor, version), _ADVICE)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_checked)


def is_in_checkpoint() -> bool:
    """Whether autograd saves for a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ in (torch_checkpoint.__name__, __name__)


def _wrapped(specs: list[tuple[Spec, bool] | None], arrivals: list[_Arrivals], args: Any, kwargs: Any) -> Any:
    """The arguments of a recomputation, which come as plain shards: global again, and leaves only if they were.

    A leaf that requires a gradient may not be written in place, and does not cache its boxings.

    Raises:
        StrategyError: there are more or fewer of them.
    """
    leaves, structure = tree_flatten((args, kwargs))
    if len(leaves) != len(specs):
        raise StrategyError(
            f"a checkpoint (recompute) runs its function again in backward, with {len(leaves)} arguments in place of "
            f"{len(specs)}: a list or dict that it gets has changed since the first run, as by skips.pop(). Give it "
            "the tensor itself and change the list outside of it, or leave the checkpoint or recompute out."
        )
    new: list[int] = []
    for position, (leaf, known) in enumerate(zip(leaves, specs, strict=True)):
        if known is not None and type(leaf) is torch.Tensor:
            leaves[position] = _made_global(leaf, *known, leaf.requires_grad)
            new.append(position)
    for found in arrivals:
        found.give_back(leaves, new)
    return tree_unflatten(leaves, structure)


def _made_global(shard: torch.Tensor, spec: Spec, is_leaf: bool, requires_grad: bool) -> GlobalTensor:
    found = shard.detach().requires_grad_(requires_grad)
    return wrap(found if is_leaf else found.view_as(found), spec)


def _start_at_the_end(result: Any, trigger: torch.Tensor, world: World) -> None:
    """Read the trigger before the first node of a result runs, once per backward.

    The hooks hold the trigger, a tensor, and not its node: before torch 2.13 a node of a function in Python loses what
    it saved together with the last tensor that it made.

    Nodes older than the trigger get no hook: they belong to arguments that the function returns, and a hook would
    make a cycle of references.
    """
    asked: set[int] = set()

    def ask(grads: Any) -> None:
        task = torch._C._current_graph_task_id()
        running = world.context.running
        if task not in asked and not (running is not None and running.computes_weights):
            asked.add(task)
            _node(trigger).saved_tensors  # noqa: B018 - unpacking is what recomputes

    for leaf in tree_leaves(result):
        node = _node(leaf) if isinstance(leaf, torch.Tensor) else None
        if node is not None and node._sequence_nr() > _node(trigger)._sequence_nr():
            node.register_prehook(ask)


def _node(tensor: torch.Tensor) -> Any:
    with local_torch():
        return tensor.grad_fn


def _drawing_alike(function: Callable[..., Any], world: World) -> Callable[..., Any]:
    """A function that may turn out to use global tensors, which draw from the world's generator."""
    states: list[torch.Tensor | None] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not states:
            states.append(_generator_state(world))
            return function(*args, **kwargs)
        with _drawing_from(states[0], world):
            return function(*args, **kwargs)

    return run


def _is_global(function: Any, args: Any, kwargs: Any) -> bool:
    if any(isinstance(leaf, GlobalTensor) for leaf in tree_leaves((args, kwargs))):
        return True
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return isinstance(module, torch.nn.Module) and any(isinstance(p, GlobalTensor) for p in module.parameters())


def _generator_state(world: World) -> torch.Tensor | None:
    return None if world.context.generator is None else world.context.generator.get_state()


@contextmanager
def _drawing_from(state: torch.Tensor | None, world: World) -> Iterator[None]:
    """Context in which the world's generator, if it has one, begins with this state; then it goes on as before."""
    generator = world.context.generator
    if generator is None:
        yield
        return
    before = generator.get_state()
    if state is not None:
        generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


# torch's ``checkpoint`` only calls its attribute ``__dynamo_disable``, where that is set.
patch(
    "torch.utils.checkpoint.checkpoint.__wrapped__.__dynamo_disable",
    "ranks would begin to recompute at different points of the backward, and their boxings would not meet",
    lambda torchs_own: checkpoint,
)
torch_checkpoint._allowed_determinism_checks_to_fns[_CHECK] = _metadata_of_shard  # adds a check to torch's
