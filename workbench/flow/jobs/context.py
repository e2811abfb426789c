"""The job that this rank is running: its scopes, the variables that it uses, and its losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Sbp, Split
from workbench.errors import JobError, PlacementError
from workbench.flow.jobs.micro_batches import counts_of_micro_batches, map_micro_batches
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor

if TYPE_CHECKING:
    from workbench.flow.jobs.store import Store

running: ContextVar[RunningJob | None] = ContextVar("workbench_flow_job", default=None)
"""The job in progress, if there is one."""


@dataclass
class RunningJob:
    """One call of a job function, on one rank.

    Attributes:
        name: of the job function.
        view: ``"consistent"`` or ``"mirrored"``.
        trains: whether the job updates variables.
        store: state that outlives the call: variables, optimizers.
        placement: the devices of the job.
        default_dtype: of variables without a dtype.
        scopes: the placements of the open scopes, innermost last.
        losses: (loss, update rule or None) in the order of the body.
        used: variables that the body has requested, by name.
        replicas: in the mirrored view, this rank's own leaf for each variable.
        counts: number of layers without a name, by kind.
    """

    name: str
    view: str
    trains: bool
    store: Store
    placement: Placement
    default_dtype: torch.dtype = torch.float32
    scopes: list[Placement] = field(default_factory=list)
    losses: list[tuple[Any, Any]] = field(default_factory=list)
    used: dict[str, GlobalTensor] = field(default_factory=dict)
    replicas: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_mirrored(self) -> bool:
        """Whether the body gets this device's arrays."""
        return self.view == "mirrored"

    @property
    def here(self) -> Placement:
        """The devices of the innermost scope."""
        return self.scopes[-1] if self.scopes else self.placement

    def enter_scope(self, scope: Any) -> Placement:
        """Run the following code on other devices; ``scope`` is a ``flow.scope.placement``."""
        if self.is_mirrored:
            raise PlacementError(
                f"{scope} in {self.name}, a job in the mirrored view: there every device runs the whole body. Take the "
                "consistent view: function_config().default_logical_view(flow.scope.consistent_view())."
            )
        devices = self.store.devices
        ranks = devices.ranks(scope.ranges, f"{scope} in {self.name}")
        self.scopes.append(devices.placement(ranks, scope.hierarchy))
        return self.scopes[-1]

    def check_view(self, view: str) -> None:
        """Refuse a ``with`` of the other view: one call has one view."""
        if view != self.view:
            raise JobError(
                f"scope.{view}_view() inside {self.name}, a job in the {self.view} view: a job has one view. Give it "
                f"in the job's config: function_config().default_logical_view(flow.scope.{view}_view())."
            )

    def own_name(self, kind: str) -> str:
        """A name for a layer without one: ``job-Dense_0``, counted in the order of the body."""
        number = self.counts[kind] = self.counts.get(kind, -1) + 1
        return f"{self.name}-{kind}_{number}"

    def to_scope(self, value: Any) -> Any:
        """``value``, boxed to the devices of the scope: variables as B, other tensors as S(0). Values that are already
        there do not change.
        """
        if not isinstance(value, GlobalTensor) or value.placement == self.here:
            return value
        is_variable = value.is_leaf and value.requires_grad
        return box(value, self.layout(Broadcast() if is_variable or not value.dim() else Split(0)))

    def layout(self, sbp: Sbp) -> Layout:
        """The layout with ``sbp`` on the first axis of the scope's devices, and B on its other axes."""
        here = self.here
        first = sbp if here.num_ranks > 1 else Broadcast()
        return Layout(here, (first,) + (Broadcast(),) * (here.num_axes - 1))


def running_job(what: str) -> RunningJob:
    """The job in progress.

    Raises:
        JobError: the caller, ``what``, is outside of a job.
    """
    job = running.get()
    if job is None:
        raise JobError(
            f"{what} is called outside of a job function, but it belongs to a job. Call it in "
            "the body of a function under @flow.global_function(...), and call that function."
        )
    return job


@contextmanager
def in_job(job: RunningJob) -> Iterator[None]:
    """Context in which this rank runs ``job``."""
    token = running.set(job)
    try:
        yield
    finally:
        running.reset(token)


def in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of tensors run on the scope's devices; outside of jobs, on the placement of its operands.

    It then takes a ``name``, which programs give to the parts of a graph, and which has no effect here.
    """

    @functools.wraps(function)
    def run(*args: Any, name: str | None = None, **kwargs: Any) -> Any:
        if counts_of_micro_batches((args, kwargs)):
            return map_micro_batches(run, args, kwargs)
        job = running.get()
        if job is None or job.is_mirrored:
            return function(*args, **kwargs)
        moved, named = tree_map(job.to_scope, (args, kwargs))
        return function(*moved, **named)

    return run
