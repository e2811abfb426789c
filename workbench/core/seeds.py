"""Runs that differ in their seed only, as one record with means and spreads: what tables and pictures compare."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.errors import RunError

_OTHERWISE_ALIKE = ("seed", "check_steps")
"""Settings in which runs of one record may differ."""
_SPREAD_OF = ("samples_per_s", "speedup", "step_s", "final_loss", "rank_seconds")


def seeds_of(seed: int, seeds: int | Iterable[int]) -> Sequence[int]:
    """The seeds that are meant: so many from ``seed`` on, or those that are listed.

    Raises:
        RunError: no such number, no whole numbers, one of them twice, or a list beside a ``seed``.

    >>> list(seeds_of(0, 3)), seeds_of(0, [7, 5])
    ([0, 1, 2], [7, 5])
    """
    fix = "Give how many, seeds=3, or which, seeds=[0, 7, 9]."
    if not _is_whole(seed):
        raise RunError(f"seed={seed!r}: a whole number, e.g. seed=0.")
    if isinstance(seeds, Integral) and _is_whole(seeds):
        count = int(seeds)
        if count < 1:
            raise RunError(f"seeds={count}: at least 1 run of each strategy. {fix}")
        return range(int(seed), int(seed) + count)
    listed = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes, Mapping)) else []
    wrong = [each for each in listed if not _is_whole(each)]
    if not listed or wrong:
        what = f", where {wrong[0]!r} is none" if wrong else ""
        raise RunError(f"seeds={seeds!r}: whole numbers, at least 1{what}. {fix}")
    whole = [int(each) for each in listed]
    twice = [each for place, each in enumerate(whole) if each in whole[:place]]
    if twice:
        raise RunError(
            f"seeds={whole}: {len(whole)} seeds, but {twice[0]} stands there twice. A seed gives the same run again: "
            "give each once."
        )
    if seed:
        raise RunError(f"seed={seed} beside seeds={whole}: the list has all seeds. Leave seed out, or give seeds=3.")
    return whole


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def with_seed(name: str, seed: int, first: int) -> str:
    """The name of a run with a seed: that of the ``first`` seed has none in its name.

    >>> with_seed("data", 0, 0), with_seed("data", 2, 0)
    ('data', 'data, seed 2')
    """
    return name if seed == first else f"{name}, seed {seed}"


def without_seed(run: RunRecord) -> str:
    """The name of a run without its seed."""
    return run.name.removesuffix(f", seed {run.settings.get('seed')}")


def groups(runs: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """The runs, those together that differ in their seed only, in the order of the first of each.

    A failed run, one that was stopped, and one whose strategy changed stand alone, and so does a second run of a seed.
    """
    found: list[list[RunRecord]] = []
    alike: dict[str, list[list[RunRecord]]] = {}
    for run in runs:
        same = alike.setdefault(_key(run), []) if _can_join(run) else []
        group = next((group for group in same if run.settings["seed"] not in _seeds(group)), None)
        if group is None:
            group = []
            found.append(group)
            same.append(group)
        group.append(run)
    return found


def repeats_of(run: RunRecord, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs that differ from a run in their seed only, whatever their names are and how they ended.

    >>> runs = [RunRecord(name, "*: data", 2, 8, settings={"seed": s}) for s, name in enumerate(["data", "mine"])]
    >>> [each.name for each in repeats_of(runs[0], runs)]
    ['data', 'mine']
    """
    return [each for each in runs if _training(each) == _training(run)]


def over_seeds(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs, and in the place of several that differ in their seed only one record of means.

    ``spread`` of that record has standard deviations, and ``settings["seeds"]`` the seeds. Peaks and differences to one
    device are the largest, and it is equal to one device if all of them are.

    >>> runs = [RunRecord(f"data, seed {s}", "*: data", 2, 8, samples_per_s=100.0 + s, settings={"seed": s})
    ...         for s in (1, 3)]
    >>> [(run.name, run.samples_per_s, round(run.spread["samples_per_s"], 2)) for run in over_seeds(runs)]
    [('data', 102.0, 1.41)]
    """
    return [_mean(group) if len(group) > 1 else group[0] for group in groups(runs)]


def _can_join(run: RunRecord) -> bool:
    has_seed = "seed" in run.settings and "seeds" not in run.settings
    return run.error is None and not run.changes and not run.segments and has_seed


def _key(run: RunRecord) -> str:
    return json.dumps((without_seed(run), len(run.losses), _training(run)), sort_keys=True, default=repr)


def _training(run: RunRecord) -> tuple[object, ...]:
    """What a run was asked to train, but for the seed."""
    settings = {name: value for name, value in run.settings.items() if name not in _OTHERWISE_ALIKE}
    return run.strategy, run.num_ranks, run.batch_size, settings


def _seeds(runs: Iterable[RunRecord]) -> list[int]:
    return [run.settings["seed"] for run in runs]


def _mean(runs: Sequence[RunRecord]) -> RunRecord:
    first = runs[0]
    spread = {name: _deviation(known) for name in _SPREAD_OF if (known := _known(runs, lambda r: getattr(r, name)))}  # noqa: B023
    judged = min(runs, key=lambda run: ({False: 0, None: 1, True: 2}[run.equal], -(run.loss_difference or 0.0)))
    verdict = judged.verdict
    if verdict.text and not judged.equal:
        verdict = replace(verdict, text=f"seed {judged.settings['seed']}: {verdict.text}")
    return replace(
        first,
        name=without_seed(first),
        losses=_means(run.losses for run in runs),
        step_times_s=_means(run.step_times_s for run in runs),
        samples_per_s=_average([run.samples_per_s for run in runs]),
        speedup=_average(_known(runs, lambda run: run.speedup)),
        peak_memory_bytes=_largest(run.peak_memory_bytes for run in runs),
        boxed_bytes_per_step=round(sum(run.boxed_bytes_per_step for run in runs) / len(runs)),
        loss_difference=max(_known(runs, lambda run: run.loss_difference), default=None),
        weight_difference=max(_known(runs, lambda run: run.weight_difference), default=None),
        equal=judged.equal,
        verdict=verdict,
        bubble=_average(_known(runs, lambda run: run.bubble)),
        layer_forward_s=_by_name([run.layer_forward_s for run in runs]),
        layer_backward_s=_by_name([run.layer_backward_s for run in runs]),
        settings={**first.settings, "seeds": _seeds(runs)},
        values={},
        spread=spread,
    )


def _known(runs: Sequence[RunRecord], value: Callable[[RunRecord], float | None]) -> list[float]:
    """The value of every run; none if a run lacks it."""
    found = [value(run) for run in runs]
    return [] if None in found else [each for each in found if each is not None]


def _average(values: Sequence[float]) -> Any:
    return sum(values) / len(values) if values else None


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; nan or infinite with values that are."""
    mean = sum(values) / len(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values) - 1)


def _means(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*rows, strict=False))


def _largest(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(max(values) for values in zip(*rows, strict=False))


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in rows[0]}
