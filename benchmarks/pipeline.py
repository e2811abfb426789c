"""Pipelines against torch.distributed.pipelining, on the same 2 and 4 processes, in one run.

    python -m benchmarks.pipeline
    python -m benchmarks.pipeline --engines 4

A GPT of 8 blocks of width 256, batch 8 x 64 in 4 micro-batches, forward, backward and AdamW: torch with
``Schedule1F1B`` and equally many blocks on each stage, and with two stages on each rank in a V (``ScheduleDualPipeV``
where there are enough micro-batches for it); the workbench with every schedule, as written and captured
(``wb.capture``). The same again with a head as large as two blocks: torch with equally many blocks on each stage, the
workbench with stages cut by ``wb.planner.partition_stages``; the simulator says what cuts can give.
Both sides have AdamW as a user gets it: torch's loops over the parameters, the workbench's goes through memory once
(`training/gradients/fused_steps`), 5% of a step here. Models start from the same weights, and must end with the same.
Measured steps are compared with what the simulator makes of the measured actions.

All of it is measured in several launches: processes that are started anew are faster or slower by some percent, torch's
and ours not alike, which no number of rounds in one launch shows. Ratios are taken within a launch; what is judged is
their median over the launches.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.harness import by_name, hand_in, interleave, is_launched, launch_often, medians, together
from benchmarks.reporting import Comparison, Target, over_launches, publish, ratios_side_by_side, table
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.core.presets import balanced_cuts
from workbench.core.strategy import Strategy
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import Timeline, measured_durations, simulate
from workbench.training.pipelining.balance import Balance, step_s

NUM_PROCESSES = (2, 4)
WIDTH, NUM_BLOCKS, BATCH, LENGTH, NUM_MICRO_BATCHES = 256, 8, 8, 64, 4
SMALL_HEAD, LARGE_HEAD = 512, 2 * (12 * WIDTH + 2 * LENGTH)
"""Words: a head of ``LARGE_HEAD`` of them multiplies as much as two blocks, per word ``WIDTH`` times so many numbers.

A block has 12 * WIDTH of them in its weights and 2 * LENGTH in its attention. It adds, norms and activates besides, so
the head takes somewhat less time than two blocks.
"""
PARITY, CUT_BY_COST, SIMULATED = Target(1.0, at_least=True), Target(1.1, at_least=True), Target(1.08)
THEIRS = "torch, Schedule1F1B, equal blocks"
_LEARNING_RATE = 1e-4
_LARGEST_WEIGHT_DIFFERENCE = 2e-3
_STEPS_OF_TIMELINE = 5
_REPEATS = 15
_WARM_UP_STEPS = 3


def make_model(num_words: int) -> GPT:
    """The same weights on every call and every rank."""
    torch.manual_seed(0)
    return GPT(WIDTH, NUM_BLOCKS, num_words, LENGTH)


def batch_of(num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the words that follow them."""
    words = torch.randint(0, num_words, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:].contiguous()


class Ours:
    """The workbench under a strategy, as written or captured; call it for one step."""

    def __init__(self, num_words: int, strategy: Strategy, captured: bool = False) -> None:
        self.batch, self.model = batch_of(num_words), wb.parallelize(make_model(num_words), strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.step: Callable[..., object] = wb.capture(self._step) if captured else self._step

    def __call__(self) -> None:
        self.step(*self.batch)

    def _step(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = wb.forward_backward(self.model, next_word_loss, words, targets)
        self.optimizer.step()
        return loss

    def timelines(self) -> list[Timeline]:
        """Of some steps."""
        found = []
        for _ in range(_STEPS_OF_TIMELINE):
            dist.barrier()
            self()
            found.append(wb.debug.timeline(self.model))
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, on every rank."""
        everywhere = wb.placement.all("cpu")
        return {
            name: wb.to_global(p.detach(), placement=everywhere, sbp="B").full_tensor()
            for name, p in self.model.named_parameters()
        }


class Part(nn.Module):
    """One of so many parts of a GPT, with as many blocks as the others, as torch's pipelines want it."""

    def __init__(self, model: GPT, number: int, num_parts: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == num_parts - 1
        per_part = NUM_BLOCKS // num_parts
        self.blocks = model.blocks[number * per_part : (number + 1) * per_part]
        if self.is_first:
            self.words, self.positions = model.words, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words or activations in, activations or scores out."""
        if self.is_first:
            x = self.words(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class Theirs:
    """torch.distributed.pipelining; call it for one step. A schedule in a V has two stages on each rank."""

    def __init__(self, num_words: int, schedule: Any = Schedule1F1B) -> None:
        self.batch, self.whole = batch_of(num_words), make_model(num_words)
        rank, num_stages = dist.get_rank(), dist.get_world_size()
        numbers, is_v = [rank], schedule is not Schedule1F1B
        if is_v:
            numbers, num_stages = [rank, 2 * num_stages - 1 - rank], 2 * num_stages
        self.parts = nn.ModuleList(Part(self.whole, number, num_stages) for number in numbers)
        stages = [
            PipelineStage(part, number, num_stages, torch.device("cpu"))
            for number, part in zip(numbers, self.parts, strict=True)
        ]
        self.schedule = schedule(stages if is_v else stages[0], NUM_MICRO_BATCHES, loss_fn=next_word_loss)
        self.optimizer = torch.optim.AdamW(self.parts.parameters(), lr=_LEARNING_RATE)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        inputs, targets = self.batch
        given = (inputs,) if any(part.is_first for part in self.parts) else ()
        self.schedule.step(*given, target=targets if any(part.is_last for part in self.parts) else None)
        self.optimizer.step()


def largest_difference(ours: Ours, theirs: Theirs) -> float:
    """Between the weights that this rank trains under torch and ours, after as many steps."""
    weights, whole = ours.weights(), dict(theirs.whole.named_parameters())
    trained = {id(parameter) for parameter in theirs.parts.parameters()}
    worst = max(float((weights[n] - p.detach()).abs().max()) for n, p in whole.items() if id(p) in trained)
    gathered: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(gathered, worst)
    return max(gathered)


def cut_evenly(num_stages: int, options: str) -> Strategy:
    """As many blocks on every stage; the head on the last one. Stages go round the processes."""
    per_stage = NUM_BLOCKS // num_stages
    rows = [f"blocks.[{k * per_stage}-{(k + 1) * per_stage - 1}]: data@{k}" for k in range(num_stages)]
    last = num_stages - 1
    return Strategy(
        f"words: data; positions: data; {'; '.join(rows)}; norm: data@{last}; head: data@{last} | "
        f"{wb.world_size()}x1x1 mb={NUM_MICRO_BATCHES} {options}"
    )


def balanced(num_words: int) -> Balance:
    """Stages by measured cost."""
    inputs, targets = (part[: BATCH // NUM_MICRO_BATCHES] for part in batch_of(num_words))
    return wb.planner.partition_stages(
        make_model(num_words),
        next_word_loss,
        inputs,
        targets,
        wb.world_size(),
        num_micro_batches=NUM_MICRO_BATCHES,
        num_repeats=_REPEATS,
    )


def on_paper(found: Balance) -> dict[str, float]:
    """Seconds of forwards and backwards, by measured costs of parts: of equal blocks, of even stages, of the cut."""
    names, costs, num_stages = list(found.costs_s), list(found.costs_s.values()), wb.world_size()
    equal = [names.index(f"blocks.{k * NUM_BLOCKS // num_stages}") for k in range(1, num_stages)]

    def of(stages: Sequence[int], schedule: str) -> float:
        totals = [sum(c for c, s in zip(costs, stages, strict=True) if s == k) for k in range(num_stages)]
        return step_s(totals, NUM_MICRO_BATCHES, schedule)

    chosen = list(found.stages.values())
    return {
        "1f1b, equal blocks": of([sum(k <= part for k in equal) for part in range(len(costs))], "1f1b"),
        "1f1b, the slowest stage as fast as can be": of(balanced_cuts(costs, num_stages), "1f1b"),
        "1f1b, cut by cost": of(chosen, "1f1b"),
        "zero_bubble, cut by cost": of(chosen, "zero_bubble"),
    }


def _take_a_step(step: Callable[[], object]) -> None:
    """In training a step follows a step of the same model; in turns the first one follows another candidate's."""
    step()


def compare(
    num_words: int,
    strategies: dict[str, tuple[Strategy, bool]],
    rounds: int,
    calls: int,
    schedules: Sequence[Any] = (),
) -> tuple[dict[str, float], float]:
    """Seconds per step of torch and of the workbench under every strategy, and the largest difference of weights.

    A strategy comes with whether its step is captured. ``schedules`` are further ones of torch.
    """
    steps: dict[str, Callable[[], None]] = {THEIRS: Theirs(num_words)}
    steps |= {f"torch, {kind.__name__}": Theirs(num_words, kind) for kind in schedules}
    steps |= {name: Ours(num_words, *strategy) for name, strategy in strategies.items()}
    for step in steps.values():
        for _ in range(_WARM_UP_STEPS):
            step()
    time_s = medians(interleave(steps, rounds, calls, around=together, before=_take_a_step))
    theirs = [step for step in steps.values() if isinstance(step, Theirs)]
    ours = [step for step in steps.values() if isinstance(step, Ours)]
    difference = max(largest_difference(one, other) for one, other in itertools.product(ours, theirs))
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"they did not train alike: weights differ by {difference:.1e}")
    return time_s, difference


def simulated_and_measured(strategy: Strategy) -> tuple[float, float]:
    """Seconds from the first action's start to the last one's end: simulated from measured actions, and measured."""
    run = Ours(SMALL_HEAD, strategy)
    for _ in range(_WARM_UP_STEPS):
        run()
    timelines = run.timelines()
    num_stages = 1 + max(span.action.stage for spans in timelines[0].spans for span in spans)
    actions = make_table(strategy.options.schedule or "1f1b", num_stages, NUM_MICRO_BATCHES, wb.world_size())
    paper = simulate(actions, num_stages, measured_durations(timelines))
    return paper.makespan_s, median(timeline.makespan_s for timeline in timelines)


def work(rounds: int, calls: int) -> None:
    """What each of the processes of a launch runs; the first one hands in."""
    wb.init()
    num = wb.world_size()
    even = {f"workbench, {name}": cut_evenly(num, name) for name in ("1f1b", "gpipe", "zero_bubble")}
    for name in VIRTUAL_SCHEDULES:
        even[f"workbench, {name}, {2 * num} stages"] = cut_evenly(2 * num, name)
    theirs = [ScheduleZBVZeroBubble, *[ScheduleDualPipeV] * (2 * num <= NUM_MICRO_BATCHES)]
    both = {name: (strategy, False) for name, strategy in even.items()}
    both |= {f"workbench, {name}, captured": (cut_evenly(num, name), True) for name in ("1f1b", "zero_bubble")}
    small, small_difference = compare(SMALL_HEAD, both, rounds, calls, theirs)
    found = balanced(LARGE_HEAD)
    cuts = {"workbench, 1f1b, equal blocks": (cut_evenly(num, "1f1b"), False)}
    for schedule, captured in itertools.product(("1f1b", "zero_bubble"), (False, True)):
        by_cost = found.strategy.with_options(num_micro_batches=NUM_MICRO_BATCHES, schedule=schedule)
        cuts[f"workbench, {schedule}, cut by cost{', captured' * captured}"] = (by_cost, captured)
    large, large_difference = compare(LARGE_HEAD, cuts, rounds, calls)
    timelines = {name: simulated_and_measured(strategy) for name, strategy in even.items()}
    if wb.rank() == 0:
        stages = list(found.stages.values())
        hand_in(
            {
                "transport": wb.init().transport_name,
                "difference": max(small_difference, large_difference),
                "small": small,
                "large": large,
                "parts": [stages.count(stage) for stage in range(num)],
                "stage_costs": found.stage_costs_s(),
                "paper": on_paper(found),
                "simulated": {name: paper for name, (paper, _) in timelines.items()},
                "measured": {name: measured for name, (_, measured) in timelines.items()},
            }
        )
    dist.barrier()


def report(launches: Sequence[Any], num: int, rounds: int, calls: int) -> None:
    """Print and keep the tables of what launches on ``num`` processes have handed in."""
    parts = {key: by_name([launch[key] for launch in launches]) for key in ("small", "large", "simulated", "measured")}
    small, large = parts["small"], parts["large"]
    deviations = {
        name: median(max(a / b, b / a) for a, b in zip(simulated, parts["measured"][name], strict=True))
        for name, simulated in parts["simulated"].items()
    }
    judged = [
        *(
            over_launches(name.removeprefix("workbench, "), time_s[name], "torch", time_s[THEIRS], target)
            for name, time_s, target in [
                ("workbench, 1f1b", small, PARITY),
                ("workbench, 1f1b, captured", small, PARITY),
                ("workbench, 1f1b, cut by cost", large, CUT_BY_COST),
                ("workbench, zero_bubble, cut by cost", large, CUT_BY_COST),
                ("workbench, 1f1b, cut by cost, captured", large, CUT_BY_COST),
            ]
        ),
        Comparison("1f1b, simulated / measured or measured / simulated", deviations["workbench, 1f1b"], SIMULATED),
    ]
    how = (
        f"{NUM_BLOCKS} blocks of width {WIDTH}, batch {BATCH} x {LENGTH} in {NUM_MICRO_BATCHES} micro-batches, "
        f"AdamW, {num} processes over {launches[0]['transport']} (torch over gloo), one thread each. {len(launches)} "
        f"launches, in each medians of {rounds} rounds of {calls} steps behind one that does not count, all candidates "
        "in turns; below are medians "
        "over the launches, of times and of their ratios to torch's in the same launch. Afterwards the weights differ "
        f"by at most {max(launch['difference'] for launch in launches):.0e}."
    )
    body = "\n\n".join(
        [
            how,
            f"A vocabulary of {SMALL_HEAD} tokens:\n\n{_times(small)}",
            f"A vocabulary of {LARGE_HEAD} tokens, as large as two blocks:\n\n{_times(large)}",
            _cuts(launches),
            "Forwards and backwards of a step, by the simulator from the measured work of actions, and measured:\n\n"
            + table(
                ["", "simulated, ms", "measured, ms", "deviation"],
                [
                    [name, _ms(parts["simulated"][name]), _ms(parts["measured"][name]), f"{deviation:.2f}"]
                    for name, deviation in deviations.items()
                ],
            ),
        ]
    )
    publish(f"pipeline-{num}", f"Pipelines against torch, {num} processes", body, judged)


def _times(time_s: dict[str, list[float]]) -> str:
    ratios = {name: ratios_side_by_side(times, time_s[THEIRS]) for name, times in time_s.items()}
    rows = [
        [name, _ms(time_s[name]), f"{median(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"]
        for name, found in ratios.items()
    ]
    return table(["", "step, ms", "times torch", "over launches"], rows)


def _cuts(launches: Sequence[Any]) -> str:
    """What cuts can give, by the costs that were measured."""
    parts = (", ".join(map(str, launch["parts"])) for launch in launches)
    costs = (", ".join(f"{cost * 1e3:.1f}" for cost in launch["stage_costs"]) for launch in launches)
    cut = "; ".join(f"{numbers} parts, {times} ms" for numbers, times in zip(parts, costs, strict=True))
    paper = by_name([launch["paper"] for launch in launches])
    first = paper["1f1b, equal blocks"]
    rows = [[name, _ms(times), f"{median(ratios_side_by_side(times, first)):.2f}"] for name, times in paper.items()]
    return (
        f"What the cuts put on the stages, and what these take per micro-batch, launch by launch: {cut}. On paper, by "
        "the measured costs of parts, without optimizer and overhead, with a core per process:\n\n"
        + table(["", "forwards and backwards, ms", "times 1f1b, equal blocks"], rows)
    )


def _ms(times_s: Sequence[float]) -> str:
    return f"{median(times_s) * 1e3:.1f}"


def main() -> int:
    """Launch on 2 and on 4 processes, or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each launch")
    parser.add_argument("--calls", type=int, default=2, help="steps per round")
    parser.add_argument("--engines", type=int, nargs="+", default=NUM_PROCESSES, help="processes: 2, 4 or both")
    args = parser.parse_args()
    if is_launched():
        work(args.rounds, args.calls)
        return 0
    for number in args.engines:
        launches = launch_often("benchmarks.pipeline", number, sys.argv[1:], args.launches)
        report(launches, number, args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
