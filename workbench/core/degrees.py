"""Mistakes in the degrees of a strategy, and degrees that fit."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.options import V_SCHEDULES, Options, format_widths

Found = tuple[str, tuple[str, ...]]
"""A message, and fixes."""


def mistakes_of_degrees(
    options: Options, degrees: tuple[int, int, int], num_stages: int, num_ranks: int
) -> list[Found]:
    """What does not fit the ranks and the stages of the rows.

    >>> mistakes_of_degrees(Options((1, 2, 1)), (1, 2, 1), num_stages=1, num_ranks=4)[0][1]
    ('use 1x4x1',)
    """
    pipeline, data, model = degrees
    product, widths = pipeline * data * model, options.widths
    is_v = options.schedule in V_SCHEDULES and (num_stages, pipeline) != (1, 1)
    num_slices = (num_stages + 1) // 2 if is_v else num_stages
    is_short = min(pipeline, num_slices) > num_ranks
    mistakes = list[Found]()
    if widths:
        if options.num_ranks != num_ranks:
            message = (
                f"stages {format_widths(widths)} take {options.num_ranks} ranks, but there are {num_ranks}: all ranks "
                "are used"
            )
            mistakes.append((message, ("write one DxM per stage, whose products add up to the ranks",)))
    elif product != num_ranks and not is_short:
        message = (
            f"{pipeline} x {data} x {model} = {product}, but there are {num_ranks} ranks: pipeline x data x "
            f"model must be the ranks"
        )
        mistakes.append((message, (_fitting_degrees(num_slices, 1, num_ranks),)))
    datas = list(dict.fromkeys(data for data, _ in widths or ((data, model),)))
    mistakes += _mistakes_of_context(options, degrees, datas, num_ranks) + _mistakes_of_shards(options, datas)
    goes_round = options.schedule == "interleaved" and num_stages % pipeline == 0
    if is_v:
        return mistakes + _mistakes_of_a_v(options, degrees, num_stages, num_ranks)
    if is_short:
        message = f"{num_stages} stages on {num_ranks} rank{'s' * (num_ranks > 1)}: every stage has ranks of its own"
        return [*mistakes, (message, (f"number the stages 0 to {num_ranks - 1}",))]
    if (options.degrees or widths) and pipeline != num_stages and not goes_round and pipeline <= num_ranks:
        message = f"pipeline degree {pipeline}, but the rows use {num_stages} stage{'s' * (num_stages > 1)}"
        message += "; interleaved takes a multiple" * (options.schedule == "interleaved")
        fixes = (_numbers_or_preset(options, pipeline, num_ranks),) if num_stages == 1 else ()
        mistakes.append((message, (*fixes, _fitting_degrees(num_stages, model, num_ranks))))
    return mistakes


def _mistakes_of_a_v(options: Options, degrees: tuple[int, int, int], num_stages: int, num_ranks: int) -> list[Found]:
    """Stages that are not two on each slice of the pipeline axis."""
    pipeline, _, model = degrees
    rule, stages = f"{options.schedule} puts 2 stages on each rank of the pipeline", f"stage{'s' * (num_stages > 1)}"
    if pipeline > num_ranks:
        message = f"{num_stages} {stages} on {num_ranks} rank{'s' * (num_ranks > 1)}: {rule}"
        return [(message, (f"number the stages 0 to {2 * num_ranks - 1}",))]
    if num_stages == 2 * pipeline:
        return []
    message = f"pipeline degree {pipeline}, but the rows use {num_stages} {stages}: {rule}, so it takes {2 * pipeline}"
    fixes = [f"number the stages 0 to {2 * pipeline - 1}"]
    if num_stages > 2 and num_stages % 2 == num_ranks % (num_stages // 2) == 0 and not options.widths:
        fixes.insert(0, _fitting_degrees(num_stages // 2, model, num_ranks))
    return [(message, tuple(fixes))]


def _mistakes_of_context(
    options: Options, degrees: tuple[int, int, int], datas: Sequence[int], num_ranks: int
) -> list[Found]:
    """A context that does not divide the data degree of every stage, from which its ranks are taken."""
    context, (pipeline, _, model) = options.context, degrees
    uneven = [each for each in datas if each % context]
    if not uneven:
        return []
    listed = " and ".join(map(str, uneven))
    message = f"context={context}, but a data degree of {listed}: its ranks are data ranks, so it divides their number"
    fixes = [f"use context={n}" for n in range(2, min(uneven) + 1) if all(each % n == 0 for each in datas)]
    ranks = num_ranks // pipeline
    if not options.widths and ranks and ranks % context == 0:
        kept = model if ranks % (context * model) == 0 else 1
        fixes.append(f"use {pipeline}x{ranks // kept}x{kept}")
    return [(message, tuple(fixes) or ("use context=1",))]


def _mistakes_of_shards(options: Options, datas: Sequence[int]) -> list[Found]:
    """Groups of ZeRO's shards that do not divide the data degree of every stage, and groups without ZeRO."""
    shards = options.shards
    if not shards:
        return []
    found = list[Found]()
    uneven = [each for each in datas if each % shards]
    if uneven or shards == 1:
        fitting = [n for n in range(2, min(datas) + 1) if all(each % n == 0 for each in datas)]
        nearest = [n for n in fitting if n <= shards][-1:] or fitting[:1]
        why = "a group has at least 2 ranks" if shards == 1 else "groups are as large as one another"
        listed = " and ".join(map(str, uneven or datas))
        message = f"shards={shards}, but a data degree of {listed}: {why}, so it divides their number"
        found.append((message, (*(f"use shards={n}" for n in nearest), "leave shards out")))
    if not options.zero:
        message = (
            f"shards={shards} with zero=0: it says over how many data ranks ZeRO splits, and zero=0 splits nothing"
        )
        found.append((message, ("use zero=3", "leave shards out")))
    return found


def mistakes_of_overlap(options: Options, num_layers: int, num_overlapping: int) -> list[Found]:
    """An overlap where no layer can have one."""
    if options.overlap == 1:
        return []
    if options.precision == "fp8":
        message = (
            f"overlap={options.overlap} cuts rows into pieces, and fp8 has one scale for all rows of a layer's input"
        )
        return [(message, ("leave overlap out", "use bf16"))]
    if num_overlapping:
        return []
    message = (
        f"overlap={options.overlap}, but 0 of {num_layers} layers are linear and split by rows over 2 ranks or more: "
        "it cuts the products of such layers, to exchange their sums meanwhile"
    )
    return [(message, ("leave overlap out", "write 'model' rows over a model degree of 2"))]


def _numbers_or_preset(options: Options, pipeline: int, num_ranks: int) -> str:
    """A fix for a pipeline whose rows name no stage."""
    fix = "put layers on stage 1 with '@1'" + f", and so on to '@{pipeline - 1}'" * (pipeline > 2)
    if options.widths or num_ranks % pipeline:
        return fix
    return f"{fix}, or write 'pipeline | {pipeline}x{num_ranks // pipeline}x1', which cuts the model"


def _fitting_degrees(num_stages: int, model: int, num_ranks: int) -> str:
    """A fix whose degrees multiply to the ranks, with the model degree that was asked for if it divides them."""
    if num_stages > num_ranks:
        return f"number the stages 0 to {num_ranks - 1}"
    if num_ranks % num_stages:
        widths = [(num_ranks + stage) // num_stages for stage in reversed(range(num_stages))]
        return f"write {format_widths([(width, 1) for width in widths])} instead"
    kept = model if num_ranks % (num_stages * model) == 0 else 1
    return f"use {num_stages}x{max(1, num_ranks // (num_stages * kept))}x{kept}"
