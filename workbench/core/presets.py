"""The classic strategies for a model, by name, and the other forms in which users give strategies.

A preset's name may have options behind it, as a text of rows has: ``"pipeline | mb=8"``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.core.compress_patterns import compress_patterns
from workbench.core.options import PRESETS, VIRTUAL_SCHEDULES, parse_options
from workbench.core.rows import Layer, Row, in_order_of_calls, listed_order
from workbench.core.strategy import Options, Strategy
from workbench.errors import StrategyError

StrategyLike = Strategy | str | Mapping[str, str] | os.PathLike[str]
"""A strategy, its text, a preset's name (maybe with options), a dict of rows, or a file of text: a path, or a name in
.strategy."""
_FILE_SUFFIX = ".strategy"


def strategy_of(wanted: StrategyLike, layers: Sequence[Layer], num_ranks: int) -> Strategy:
    """The strategy for a model, from a strategy, its text, a preset's name, a dict of rows or a file.

    Raises:
        StrategyError: it is none of these (the nearest preset is named), or the file cannot be read.

    >>> layers = [Layer("fc1", "Linear"), Layer("head", "Linear")]
    >>> strategy_of("pipeline", layers, 2), strategy_of({"fc*": "data", "head": "model"}, layers, 2)
    (Strategy('fc1: data@0; head: data@1 | 2x1x1 mb=4 1f1b'), Strategy('fc*: data; head: model'))
    >>> strategy_of("pipeline | mb=8", layers, 2)
    Strategy('fc1: data@0; head: data@1 | 2x1x1 mb=8 1f1b')
    """
    wanted = _read(wanted)
    if isinstance(wanted, Strategy):
        return wanted
    if isinstance(wanted, str) and (name := preset_name(wanted)):
        return preset(name, layers, num_ranks, wanted.partition("|")[2])
    return Strategy(wanted)


def refitted(strategy: Strategy, layers: Sequence[Layer], num_ranks: int) -> Strategy:
    """A strategy for another number of ranks: the same one, or with another data degree, or data parallel.

    >>> layers = [Layer("fc1", "Linear", {"weight": (8, 4)}), Layer("head", "Linear", {"weight": (2, 8)})]
    >>> refitted(Strategy("fc1: data; head: model | 1x2x2"), layers, 2)
    Strategy('fc1: data; head: model | 1x1x2')
    >>> refitted(Strategy("fc1: data; head: data@1 | 2x2x1 zero=1"), layers, 1)
    Strategy('*: data | zero=1')
    """
    options, candidates = strategy.options, [strategy]
    if options.degrees is not None:
        pipeline, _, model = options.degrees
        candidates.append(strategy.with_options(degrees=(pipeline, max(1, num_ranks // (pipeline * model)), model)))
    candidates += [each.with_options(shards=0) for each in candidates if each.options.shards]
    candidates += [each.with_options(overlap=1) for each in candidates if each.options.overlap > 1]
    kept = ("zero", "recompute", "precision", "offload")
    plain = replace(Options(), **{name: getattr(options, name) for name in kept})
    candidates.append(Strategy.from_rows(Strategy("*: data").rows, plain))
    return next(each for each in candidates if each is candidates[-1] or not each.check(layers, num_ranks))


def stages_preset(wanted: StrategyLike) -> str | None:
    """The text of a preset that cuts stages, with its options; None for other strategies.

    >>> stages_preset("pipeline | mb=8"), stages_preset("data")
    ('pipeline | mb=8', None)
    """
    wanted = _read(wanted)
    return wanted if isinstance(wanted, str) and preset_name(wanted) == "pipeline" else None


def _read(wanted: StrategyLike) -> Strategy | str | Mapping[str, str]:
    """The text of a file; other values unchanged."""
    if isinstance(wanted, os.PathLike) or (isinstance(wanted, str) and wanted.strip().endswith(_FILE_SUFFIX)):
        return read_strategy(Path(wanted.strip() if isinstance(wanted, str) else wanted))
    return wanted


def preset_name(wanted: object) -> str | None:
    """The preset that a text names, with or without options behind it; None where it has rows, or is no text.

    >>> preset_name("pipeline | mb=8"), preset_name("*: data | mb=8")
    ('pipeline', None)
    """
    name = wanted.partition("|")[0].strip() if isinstance(wanted, str) else ""
    return name if name in PRESETS else None


def read_strategy(path: Path) -> str:
    """The text in a file that ``workbench plan --out`` or an editor wrote; rows may stand on lines of their own.

    Raises:
        StrategyError: there is no such file, or it is not text.
    """
    try:
        return " ".join(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StrategyError(
            f"strategy {str(path)!r}: {why}. A file of a strategy holds its text, such as '*: data'; "
            f"workbench plan --out FILE writes one."
        ) from error


def preset(name: str, layers: Sequence[Layer], num_ranks: int, options: str = "") -> Strategy:
    """One of the classic strategies for a model.

    data: every layer data parallel. model: every weight split. pipeline: as many stages as ranks (or as the degrees
    among the options say; two on every rank under schedules that take several), cut by parameters; by ``gpipe`` where
    every cut goes through layers that a forward comes back to. hybrid: the first layers data, the last ones (with most
    of the parameters, usually) model parallel.

    Args:
        options: words that say more than the preset, or something else: ``"mb=8 gpipe"``.

    Raises:
        StrategyError: an unknown name, an option that is none, or more stages than layers.
    """
    mistakes: list[str] = []
    given = parse_options(options, mistakes)
    if mistakes:
        raise StrategyError(f"strategy {f'{name} |{options}'!r}: " + "; ".join(mistakes))
    if name == "data" or name == "model":
        return Strategy.from_rows([Row("*", name)], given)
    names = [layer.name for layer in layers]
    if name == "hybrid":
        half = (len(layers) + 1) // 2
        listed = enumerate(listed_order(layers))
        choices = {layers[at].name: "data" if place < half else "model" for place, at in listed}
        rows = [Row(layer.name, choices[layer.tied_to or layer.name]) for layer in layers]
        base = Options(degrees=(1, 1, num_ranks))
        return Strategy.from_rows(compress_patterns(names, rows), parse_options(options, [], base))
    if name != "pipeline":
        raise StrategyError(f"preset {name!r} is none of {', '.join(PRESETS)}.")
    degree = given.degrees[0] if given.degrees else len(given.widths or range(num_ranks))
    cuts = stage_cuts(layers, 2 * degree if given.schedule in VIRTUAL_SCHEDULES else degree)
    rows = [Row(layer.name, "data", None, stage) for layer, stage in zip(layers, cuts, strict=True)]
    schedule = "gpipe" if _comes_back(layers, cuts) else "1f1b"
    base = Options((degree, 1, 1), num_micro_batches=2 * degree, schedule=schedule)
    return Strategy.from_rows(compress_patterns(names, rows), parse_options(options, [], base))


def block_of(name: str) -> str:
    """The repeated block that a layer belongs to: its path up to the first number.

    >>> block_of("model.layers.3.mlp.up_proj"), block_of("head")
    ('model.layers.3', 'head')
    """
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def stage_cuts(layers: Sequence[Layer], num_stages: int) -> list[int]:
    """The stage of every layer, by parameters, in the order in which a forward calls them, if it is known.

    Inside a block a model may list and call layers in any order, so stages are cut between blocks, as long as there
    are enough of them. What a forward comes back to stays on one stage, if that leaves enough parts.

    Raises:
        StrategyError: more stages than layers.

    >>> calls = {"head": (3, 3), "words": (1, 1), "body": (2, 2)}
    >>> stage_cuts([Layer(name, "Linear", num_parameters=9, calls=where) for name, where in calls.items()], 3)
    [2, 0, 1]
    """
    if num_stages > len(layers):
        raise StrategyError(
            f"pipeline of {num_stages} stages, but the model has {len(layers)} layers; each stage needs one."
        )
    units: tuple[Callable[[str], str], ...] = (block_of, str)  # blocks, and then single layers
    every = (stage_parts(layers, unit_of, joins_loops) for joins_loops in (True, False) for unit_of in units)
    parts = next(found for found in every if len(found) >= num_stages)
    weights = [sum(layer.num_parameters for layer in part) for part in parts]
    cuts = zip(parts, balanced_cuts(weights, num_stages), strict=True)
    stages = {layer.name: stage for part, stage in cuts for layer in part}
    return [stages[layer.name] for layer in layers]


def stage_parts(
    layers: Sequence[Layer], unit_of: Callable[[str], str] = block_of, joins_loops: bool = True
) -> list[list[Layer]]:
    """Parts of a model between which it can be cut, in the order of calls.

    Args:
        unit_of: the unit that a layer's name belongs to.
        joins_loops: whether units that take turns are one part.
    """
    units: dict[str, list[Layer]] = {}
    for layer in in_order_of_calls(layers):
        units.setdefault(unit_of(layer.name), []).append(layer)
    parts: list[list[Layer]] = []
    end = -1
    for unit in units.values():
        calls = [layer.calls for layer in unit if layer.calls is not None]
        if joins_loops and calls and calls[0][0] <= end:
            parts[-1] += unit
        else:
            parts.append(unit)
        end = max([end, *(last for _, last in calls)])
    return parts


def _comes_back(layers: Sequence[Layer], stages: Sequence[int]) -> bool:
    """Whether a forward comes back to an earlier stage."""
    calls = [(layer.calls, stage) for layer, stage in zip(layers, stages, strict=True) if layer.calls]
    return any(
        stage < later and first < start <= last
        for (first, last), stage in calls
        if first < last
        for (start, _), later in calls
    )


def balanced_cuts(weights: Sequence[float], num_parts: int) -> list[int]:
    """The part of each of a row of weights, cut into consecutive parts whose largest sum is smallest.

    >>> balanced_cuts([5, 1, 1, 1, 2], 2)
    [0, 1, 1, 1, 1]
    """
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    for parts in range(1, num_parts + 1):
        for end in range(parts, len(weights) + 1):
            options = [
                (max(best[start, parts - 1][0], total[end] - total[start]), start)
                for start in range(parts - 1, end)
                if (start, parts - 1) in best
            ]
            if options:
                best[end, parts] = min(options)
    end, result = len(weights), [0] * len(weights)
    for part in range(num_parts, 0, -1):
        start = best[end, part][1]
        result[start:end] = [part - 1] * (end - start)
        end = start
    return result


__all__ = [
    "PRESETS", "StrategyLike", "balanced_cuts", "block_of", "preset", "preset_name", "read_strategy", "stage_cuts",
    "stage_parts", "stages_preset", "strategy_of",
]  # fmt: skip
