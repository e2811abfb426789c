"""A chosen strategy as a script for torchrun: ``wb.planner.script``.

`sources` imports the user's functions, `words` are the comments, `recipe` has what both scripts share.
`workbench_script` trains with the workbench, `torch_script` with torch alone, by the plan of `torch_plan`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from workbench.core.presets import StrategyLike, preset_name, strategy_of
from workbench.errors import RunError, StrategyError
from workbench.session.scripts.recipe import Recipe
from workbench.session.scripts.sources import Source

if TYPE_CHECKING:
    Function = Callable[..., Any] | str | None

LIBRARIES = ("workbench", "torch")


def script(
    strategy: StrategyLike,
    num_ranks: int,
    model_fn: Function = None,
    dataset: Any = None,
    loss_fn: Function = None,
    *,
    optimizer_fn: Function = None,
    collate_fn: Function = None,
    count: Function = None,
    batch_size: int = 64,
    steps: int = 100,
    seed: int = 0,
    library: Literal["workbench", "torch"] = "workbench",
) -> str:
    """The text of a Python script that trains under a strategy, for ``torchrun``, without a notebook.

    Functions are those of ``wb.compare``. The script imports them; one that is not given, or that no file defines (a
    notebook's cell), has a place to fill in, which says ``FILL IN``. With the same numbers as a comparison, the script
    prints its losses.

    Args:
        strategy: as for ``wb.parallelize``. The script has it row by row, with what each row does.
        num_ranks: the number of processes.
        model_fn, dataset, loss_fn, optimizer_fn, collate_fn, count: as for ``wb.compare``: a function or data set, or
            where it is, ``"module:name"``. Without ``loss_fn`` the model returns its own loss.
        batch_size: samples per step, over all ranks.
        steps: training steps.
        seed: of the weights and the order of samples.
        library: ``"torch"`` writes a script without the workbench: DistributedDataParallel or ``fully_shard``,
            ``parallelize_module``, a device mesh. For these splits, and to see which parameters get gradients, the
            model is made here and run on two samples.

    Raises:
        StrategyError: the strategy does not fit the model, or torch has no equivalent: it lists each row and option.
        RunError: a function that cannot be found.

    >>> text = wb.planner.script("*: data | zero=3", num_ranks=2)
    >>> [line.strip() for line in text.splitlines() if "raise" in line and "dataset" in line]
    ['raise NotImplementedError("FILL IN: dataset")']
    """
    if library not in LIBRARIES:
        raise RunError(f"script(library={library!r}): there are {' and '.join(LIBRARIES)}.")
    optional = {"loss_fn": loss_fn, "optimizer_fn": optimizer_fn, "collate_fn": collate_fn, "count": count}
    given = {"model_fn": model_fn, "dataset": dataset}
    given |= {role: function for role, function in optional.items() if function is not None}
    sources = {role: Source.of(role, value) for role, value in given.items()}
    recipe = _recipe(strategy, num_ranks, sources, (batch_size, steps, seed))
    if library == "torch":
        from workbench.session.scripts.torch_script import torch_script

        return _checked(torch_script(recipe))
    from workbench.session.scripts.workbench_script import workbench_script

    return _checked(workbench_script(recipe))


def _checked(text: str) -> str:
    """The text, which is Python.

    Raises:
        RunError: it is not, because of a name in it.
    """
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise RunError(
            f"script: line {error.lineno} would be no Python: {line}: {error.msg}. Names of layers and files "
            "stand in the script: change the one there."
        ) from error
    return text


def _recipe(wanted: StrategyLike, num_ranks: int, sources: dict[str, Source], numbers: tuple[int, int, int]) -> Recipe:
    make = sources["model_fn"].value
    if make is None:
        if preset_name(wanted) is not None:
            raise StrategyError(f"{wanted!r} is made for a model: give model_fn, or rows such as '*: data'.")
        recipe = Recipe(strategy_of(wanted, [], num_ranks), num_ranks, sources, *numbers)
    else:
        from workbench.training.costs.layer_costs import made_for_shapes
        from workbench.training.strategies.state import describe

        model = made_for_shapes(make)
        layers = describe(model)
        strategy = strategy_of(wanted, layers, num_ranks)
        resolved = strategy.resolve(layers, num_ranks)
        recipe = Recipe(strategy, num_ranks, sources, *numbers, model, layers, resolved)
    if recipe.samples is not None:
        from workbench.training.datasets import check_dataset, num_samples_of
        from workbench.training.runs.job_checks import check_batch_size

        collate = sources.get("collate_fn")
        check_dataset(recipe.samples, None if collate is None else collate.value, "script")
        check_batch_size(recipe.batch_size, num_samples_of(recipe.samples), recipe.samples)
    return recipe


__all__ = ["LIBRARIES", "script"]
