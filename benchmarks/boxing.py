"""Boxings on one host against torch's DTensor, against gloo, and against a plain copy: 2 and 4 processes.

    python -m benchmarks.boxing

Each boxing is an explicit ``x.to_global(sbp=...)`` without autograd, its DTensor counterpart ``d.redistribute``; the
results of both are compared before they are timed. *In the segment* means that the source's shard lies in the
transport's memory, as the library's own results do; *outside* that it is an ordinary tensor. All candidates take turns
in one run, on the same processes; a turn begins when all ranks have met, and ends when all have done their calls. It
took as long as on the rank where it took longest: where ranks share a core, others may be done before one begins.

The limit is a warm ``copy_`` of as many bytes as a rank's new shard has, between ordinary tensors. *All copy* is the
time in which every rank makes one: ranks that share cores share them here as in a boxing. *One copies* is the time of
the first rank's while all others wait: it has a core and the caches to itself. Where ranks share cores this is shown
but not judged, since the plain copies of all ranks cannot be made in that time either.

All of it is measured in several launches: where the memory of new processes lies, and what else the host does, changes
the ratios of large boxings to copies by a fifth, which no number of rounds in one launch shows. Ratios are taken within
a launch; what is judged is their median over the launches.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import workbench as wb
from benchmarks.harness import (
    Action,
    by_name,
    geometric_mean,
    hand_in,
    interleave,
    is_launched,
    launch_often,
    medians,
)
from benchmarks.reporting import Comparison, Target, over_launches, publish, ratios_side_by_side, table
from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.boxing.exchange import exchange_between
from workbench.tensors.global_tensor import spec_of, wrap
from workbench.tensors.world import World, current
from workbench.transport.base import Transport
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.hang_detector import HangDetector
from workbench.transport.rendezvous import join_rendezvous
from workbench.units import format_bytes

NUM_PROCESSES = (2, 4)
SIZES = {4 * 2**10: 20, 64 * 2**10: 20, 2**20: 6, 4 * 2**20: 6, 16 * 2**20: 4}
"""Logical bytes, and calls per turn."""
PAIRS = [("S(0)", "B"), ("S(1)", "B"), ("P", "B"), ("P", "S(0)"), ("S(0)", "S(1)"), ("B", "S(0)")]
APART = ("B", "S(0)")
"""Moves nothing: shown, and not in the means."""
SPEED = {
    4 * 2**10: Target(20, at_least=True),
    64 * 2**10: Target(10, at_least=True),
    4 * 2**20: Target(4, at_least=True),
}
LIMIT_SIZE, LIMIT_PAIRS = 16 * 2**20, [("S(0)", "S(1)"), ("S(0)", "B"), ("S(1)", "B")]
LIMITS = {"in segment": Target(1.5), "outside": Target(2.5)}
CACHED, PLANNING, ISSUE = Target(5, unit="us"), Target(1000, unit="us"), Target(1 / 3)
OURS = ("in segment", "outside", "over gloo")
ALL_COPY, ONE_COPIES = "all copy", "one copies"
_DTENSOR = {"S(0)": Shard(0), "S(1)": Shard(1), "B": Replicate(), "P": Partial()}
_PLANNED = 300


@dataclass(frozen=True)
class Case:
    """One boxing of a square float32 tensor of so many bytes."""

    size: int
    source: str
    target: str

    @property
    def pair(self) -> tuple[str, str]:
        """Source and target."""
        return self.source, self.target

    @property
    def has_limit(self) -> bool:
        """Whether it is compared with copies."""
        return self.size == LIMIT_SIZE and self.pair in LIMIT_PAIRS

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Boxings:
    """All candidates for one case, on this rank."""

    def __init__(self, case: Case, gloo: World) -> None:
        world = current()
        side = round((case.size / 4) ** 0.5)
        placement = Placement.of("cpu", list(range(world.world_size)))
        layout = Layout.of(placement, case.source)
        generator = torch.Generator().manual_seed(1 if case.source != "P" else 1 + world.rank)
        whole = torch.randn(side, side, generator=generator)
        shard = whole[tuple(slice(*bounds) for bounds in layout.region((side, side), world.rank))].contiguous()
        sources = {
            "in segment": _in_segment(world.transport, shard),
            "outside": shard.clone(),
            "over gloo": shard.clone(),
        }
        self._sources = {
            name: wrap(local, spec_of(gloo if name == "over gloo" else world, layout, (side, side)))
            for name, local in sources.items()
        }
        mesh = init_device_mesh("cpu", (world.world_size,))
        self._mesh, self._goal, self._sbp = mesh, _DTENSOR[case.target], _entry(case.target)
        self._theirs = DTensor.from_local(shard.clone(), mesh, [_DTENSOR[case.source]])
        rows = self.box("outside").to_local()
        self._from, self._to = torch.randn(rows.shape), torch.randn(rows.shape)
        self._number = wb.to_global(torch.ones(1), placement=placement, sbp="P")

    def box(self, name: str) -> Any:
        """Ours."""
        return self._sources[name].to_global(sbp=self._sbp)

    def redistribute(self) -> Any:
        """DTensor's."""
        return self._theirs.redistribute(self._mesh, [self._goal])

    def check(self) -> None:
        """All give the same shard, in memory of its own."""
        expected = self.redistribute().to_local()
        for name in OURS:
            for _ in range(3):
                torch.testing.assert_close(self.box(name).to_local(), expected)

    def copy(self) -> None:
        """As many bytes as the new shard has, from and to ordinary memory."""
        self._to.copy_(self._from)

    def copy_on_first_rank(self) -> None:
        """The same on one rank alone."""
        if current().rank == 0:
            self.copy()

    def meet(self) -> None:
        """Go on when all ranks have come here."""
        self._number.to_global(sbp=wb.sbp.broadcast)

    @contextmanager
    def until_all_are_done(self) -> Iterator[None]:
        """A turn ends when every rank's has."""
        yield
        self.meet()

    def candidates(self) -> dict[str, Action]:
        """By name."""
        ours: dict[str, Action] = {name: lambda name=name: self.box(name) for name in OURS}  # type: ignore[misc]
        return ours | {"DTensor": self.redistribute, ALL_COPY: self.copy, ONE_COPIES: self.copy_on_first_rank}


def _in_segment(transport: Transport, shard: torch.Tensor) -> torch.Tensor:
    empty: Callable[..., torch.Tensor] = getattr(transport, "empty", torch.empty)
    return empty(shard.shape, dtype=shard.dtype).copy_(shard)


def _entry(text: str) -> Any:
    return wb.sbp.broadcast if text == "B" else wb.sbp.split(int(text[2]))


def gloo_world(init_method: str = "env://") -> World:
    """A second world of the same ranks, with a rendezvous of its own, whose tensors travel over gloo."""
    world = current()
    rendezvous = join_rendezvous(init_method, world.rank, world.world_size, 1_000_000, 60.0)
    hang_detector = HangDetector(rendezvous, world.rank)
    transport = GlooTransport(world.rank, world.world_size, 60.0, hang_detector)
    return World(world.rank, world.world_size, torch.device("cpu"), transport)


def measure(case: Case, gloo: World, rounds: int, calls: int) -> dict[str, float]:
    """Median seconds per call of every candidate."""
    boxings = Boxings(case, gloo)
    boxings.check()

    def start_together(action: Action) -> None:
        action()
        dist.barrier()
        action()
        boxings.meet()

    times = interleave(boxings.candidates(), rounds, calls, around=boxings.until_all_are_done, before=start_together)
    return medians(on_the_slowest_rank(times))


def on_the_slowest_rank(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Of every turn, the time of the rank where it took longest; equal on all ranks."""
    turns = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(turns, op=dist.ReduceOp.MAX)
    return dict(zip(times, turns.tolist(), strict=True))


def shares_cores() -> bool:
    """Whether there are more ranks than cores."""
    return dist.get_world_size() > len(os.sched_getaffinity(0))


def measure_issue(gloo: World, calls: int) -> tuple[float, float]:
    """Median CPU seconds of the main thread for one boxing of 4 KB, ours and DTensor's."""
    found: tuple[list[float], list[float]] = ([], [])
    for pair in PAIRS:
        if pair == APART:
            continue
        boxings = Boxings(Case(4 * 2**10, *pair), gloo)
        actions: Sequence[Action] = (lambda boxings=boxings: boxings.box("in segment"), boxings.redistribute)  # type: ignore[misc]
        for action, times in zip(actions, found, strict=True):
            action()
            dist.barrier()
            started = time.thread_time()
            for _ in range(calls):
                action()
            times.append((time.thread_time() - started) / calls)
    return median(found[0]), median(found[1])


def measure_planning() -> dict[str, float]:
    """Seconds to plan a boxing for this rank: found in the caches, and for a shape that is new, on 1 and 2 axes."""
    world = current()
    flat = Placement.of("cpu", list(range(world.world_size)))
    grid = Placement.of("cpu", [list(range(world.world_size))[: world.world_size // 2],
                                list(range(world.world_size))[world.world_size // 2 :]])  # fmt: skip
    found = {}
    for name, placement, source, target in [
        ("1 axis, new shape", flat, "S(0)", "S(1)"),
        ("2 axes, new shape", grid, "S(0), P", "B, S(1)"),
    ]:
        before, after = Layout.of(placement, source), Layout.of(placement, target)
        times = []
        for number in range(_PLANNED):
            started = time.perf_counter()
            plan = plan_boxing(before, after, (1000 + number, 1000), 4)
            plan.moves_to(world.rank), plan.moves_from(world.rank), plan.bytes_sent
            times.append(time.perf_counter() - started)
        found[name] = median(times)
    one = spec_of(world, Layout.of(flat, "S(0)"), (64, 64))
    other = spec_of(world, Layout.of(flat, "S(1)"), (64, 64))
    exchange_between(one, other, torch.float32)
    times = []
    for _ in range(_PLANNED):
        started = time.perf_counter()
        for _ in range(100):
            exchange_between(spec_of(world, one.layout, (64, 64)), other, torch.float32)
        times.append((time.perf_counter() - started) / 100)
    return {"cached": median(times)} | found


def measure_all(cases: Sequence[Case], gloo: World, rounds: int) -> dict[str, Any]:
    """What a launch hands in."""
    return {
        "times": [((case.size, *case.pair), measure(case, gloo, rounds, SIZES.get(case.size, 10))) for case in cases],
        "issue": measure_issue(gloo, 10 * rounds),
        "planning": measure_planning(),
        "shares_cores": shares_cores(),
    }


Times = Mapping[Case, Mapping[str, Sequence[float]]]
"""Seconds per call of every candidate for every case, launch by launch."""


def report(launches: Sequence[Any], num_processes: int, rounds: int) -> None:
    """Print and keep the tables of what launches on so many processes have handed in."""
    times = {
        Case(size, source, target): by_name([launch["times"][index][1] for launch in launches])
        for index, ((size, source, target), _) in enumerate(launches[0]["times"])
    }
    with_names = [*OURS, "DTensor", ALL_COPY, ONE_COPIES]
    rows = []
    for case, time_s in times.items():
        cells = [f"{median(time_s[name]) * 1e6:.0f}" for name in with_names]
        speed = f"{median(ratios_side_by_side(time_s['in segment'], time_s['DTensor'])):.1f}"
        ratios = [ratios_side_by_side(time_s[name], time_s["in segment"]) for name in (ALL_COPY, ONE_COPIES)]
        copies = [f"{median(found):.2f}" for found in ratios]
        spread = f"{min(ratios[0]):.2f} to {max(ratios[0]):.2f}"
        rows.append([f"{format_bytes(case.size)} {case}", *cells, speed, *copies, spread])
    names = ["DTensor / in segment", f"in segment / {ALL_COPY}", f"in segment / {ONE_COPIES}"]
    header = ["", *(f"{name}, us" for name in with_names), *names, f"in segment / {ALL_COPY}, by launch"]
    shares_cores = any(launch["shares_cores"] for launch in launches)
    judged = [*_speeds(times), *_limits(times, shares_cores)]
    judged += [
        Comparison(f"planning, {name}", median(found) * 1e6, CACHED if name == "cached" else PLANNING)
        for name, found in by_name([launch["planning"] for launch in launches]).items()
    ]
    ours, theirs = zip(*(launch["issue"] for launch in launches), strict=True)
    judged.append(over_launches("CPU to issue", ours, "DTensor", theirs, ISSUE))
    body = (
        f"Square float32 tensors on {num_processes} processes of one host, one thread each. {len(launches)} launches, "
        f"in each medians over {rounds} rounds, in which the candidates take turns; below are medians over the "
        f"launches, of times and of ratios in the same launch.\n\n{table(header, rows)}\n\nSpeeds are "
        f"geometric means over all pairs but {APART[0]} -> {APART[1]}, which moves nothing."
        f"{_about_copies(times) if shares_cores else ''}"
    )
    publish(f"boxing-{num_processes}", f"Boxings on {num_processes} processes of one host", body, judged)


def _speeds(times: Times) -> list[Comparison]:
    found = []
    for size, target in SPEED.items():
        for where in ("in segment", "outside"):
            cases = [t for case, t in times.items() if case.size == size and case.pair != APART]
            if cases:
                ours, theirs = (
                    [geometric_mean(launch) for launch in zip(*(t[name] for t in cases), strict=True)]
                    for name in (where, "DTensor")
                )
                aim = target if where == "in segment" else Target(1, at_least=True)
                found.append(over_launches(f"{format_bytes(size)} {where}", ours, "DTensor", theirs, aim))
    return found


def _about_copies(times: Times) -> str:
    """Why a lone copy is no limit where ranks share cores."""
    ratios = [median(ratios_side_by_side(t[ONE_COPIES], t[ALL_COPY])) for case, t in times.items() if case.has_limit]
    if not ratios:
        return ""
    return (
        f" Ranks share cores: the plain copies of all of them took {min(ratios):.2f} to {max(ratios):.2f} times as "
        "long as that of one alone, which is therefore shown and not judged."
    )


def _limits(times: Times, shares_cores: bool) -> list[Comparison]:
    limits = [ALL_COPY] if shares_cores else [ALL_COPY, ONE_COPIES]
    return [
        over_launches(f"{format_bytes(case.size)} {case}, {where} / {what}", t[where], "copy", t[what], limit)
        for case, t in times.items()
        if case.has_limit
        for what in limits
        for where, limit in LIMITS.items()
    ]


def work(rounds: int, sizes: Sequence[int]) -> None:
    """What each of the processes of a launch runs; the first one hands in."""
    torch.set_num_threads(1)
    wb.init()
    gloo = gloo_world()
    found = measure_all([Case(size, *pair) for size in sizes for pair in PAIRS], gloo, rounds)
    if wb.rank() == 0:
        hand_in(found)
    dist.barrier()


def main() -> int:
    """Launch on 2 and on 4 processes, or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="logical bytes")
    parser.add_argument("--processes", type=int, nargs="+", default=NUM_PROCESSES)
    args = parser.parse_args()
    if is_launched():
        work(args.rounds, args.sizes)
        return 0
    for number in args.processes:
        report(launch_often("benchmarks.boxing", number, sys.argv[1:], args.launches), number, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
