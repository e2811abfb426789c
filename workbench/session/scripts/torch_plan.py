"""A strategy as torch's own parallelism: what each layer becomes, or why it has no equivalent.

Data ranks: DistributedDataParallel, or ``fully_shard`` for ZeRO 2 and 3. Model ranks: ``parallelize_module``. Between
layers of which nothing is split, every model rank computes the same; the workbench shares out the samples there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE
from workbench.errors import StrategyError
from workbench.session.scripts.recipe import Recipe

_KINDS = ("Linear", TABLE)
_NO_OPTION = {
    "zero=1": "torch shards gradients with the optimizer's state: use zero=2",
    "context": "torch has no equivalent that leaves the model as it is",
    "sequence": "SequenceParallel needs layouts for each module between the split ones",
    "mb": "no plan is written for micro-batches: give a smaller batch",
    "recompute=": "torch's wrapper runs whole blocks again: use recompute",
    "offload=": "the offloading of fully_shard moves parameters, and steps on the CPU: leave it out",
    "overlap=": "torch overlaps these sums when it compiles the model: leave it out",
    "fp8": "torch itself has no linear layers in 8 bits: use bf16",
    "fp16": "gradients need a scaler that knows the shards: use bf16",
}
"""By the beginning of an option: why it has no equivalent."""


@dataclass(frozen=True)
class TorchPlan:
    """What the script does to the model.

    Attributes:
        axes: the names and sizes of the device mesh's dims, the outermost first.
        styles: for each split layer its name, and the style as an expression.
        units: the modules that are sharded, or run again, each as one.
        is_sharded: whether ``fully_shard`` is used; else DistributedDataParallel, where there are data ranks.
        keeps_whole: whether parameters stay whole from forward to backward (ZeRO 2).
        has_unused: whether parameters get no gradient, for which DistributedDataParallel would wait.
    """

    axes: dict[str, int]
    styles: list[tuple[str, str]]
    units: list[str]
    is_sharded: bool
    keeps_whole: bool
    has_unused: bool = False

    @property
    def num_replicas(self) -> int:
        """How many parts a batch has."""
        return self.axes.get("replicate", 1) * self.axes.get("shard", 1) * self.axes.get("data", 1)


def torch_plan(recipe: Recipe) -> TorchPlan:
    """The plan.

    Raises:
        StrategyError: the model is not known, or a part of the strategy has no equivalent in torch; it lists all.
    """
    if recipe.model is None or recipe.resolved is None:
        raise StrategyError("a plan for torch needs the model's layers: give model_fn, a function or 'module:name'.")
    reasons = [*_of_rows(recipe), *_of_options(recipe)]
    if reasons:
        lines = "".join(f"\n  {what}: {why}." for what, why in reasons)
        raise StrategyError(
            f"strategy {str(recipe.strategy)!r} is not a plan of torch; these parts have no equivalent:{lines}\n"
            'script(library="workbench") writes any strategy.'
        )
    (data, model), options = recipe.resolved.stage_width(0), recipe.resolved.options
    is_sharded = options.zero > 1 or (data > 1 and model > 1)
    shard = (options.shards or data) if options.zero > 1 else 1
    axes = {"replicate": data // shard, "shard": shard} if is_sharded else {"data": data}
    if is_sharded and data == shard:
        del axes["replicate"]
    axes = {name: size for name, size in (axes | {"model": model}).items() if size > 1 or name == "shard"}
    has_unused = not is_sharded and data > 1 and _has_unused(recipe)
    styles, units = _styles(recipe, model), _units(recipe)
    return TorchPlan(axes or {"data": 1}, styles, units, is_sharded, options.zero == 2, has_unused)


def _of_rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The rows without an equivalent, each once, with the first reason."""
    assert recipe.layers is not None
    assert recipe.resolved is not None
    found: dict[str, str] = {}
    tied = {layer.tied_to for layer in recipe.layers} | {layer.name for layer in recipe.layers if layer.tied_to}
    shapes = {layer.name: layer.shapes for layer in recipe.layers}
    for row, choice in zip(recipe.strategy.rows_of(recipe.layers), recipe.resolved.layers, strict=True):
        why = _why_not(choice, shapes[choice.name], choice.name in tied, recipe.resolved.stage_width(0)[1])
        if row.parallel == "model" and choice.kind.startswith("Conv"):
            why = why or f"{choice.name} is a {choice.kind}; ColwiseParallel takes Linear and Embedding"
        if why:
            found.setdefault(str(row), why)
    yield from found.items()


def _why_not(choice: ResolvedLayer, shapes: dict[str, tuple[int, ...]], is_tied: bool, num_parts: int) -> str:
    if choice.stage:
        return f"{choice.name} is on stage {choice.stage} of a pipeline, for which no plan is written"
    if choice.split == "expert" or choice.parallel == "expert" or choice.expert is not None:
        return f"{choice.name} has experts, whose tokens travel"
    if choice.split is None:
        return ""
    if choice.kind not in _KINDS:
        return f"{choice.name} is a {choice.kind}; ColwiseParallel and RowwiseParallel take Linear and Embedding"
    if is_tied:
        return f"{choice.name} shares its weight, and parallelize_module would give each layer its own"
    size = shapes["weight"][(choice.split == "row") != (choice.kind == TABLE)]
    if size % num_parts:
        return f"{choice.name} has {size} features, which do not divide by {num_parts} model ranks"
    return ""


def _of_options(recipe: Recipe) -> Iterator[tuple[str, str]]:
    assert recipe.resolved is not None
    data, options = recipe.resolved.stage_width(0)[0], recipe.resolved.options
    for option in str(recipe.strategy.options).split():
        why = next((why for word, why in _NO_OPTION.items() if option.startswith(word)), "")
        if why:
            yield option, why
    if options.zero > 1 and data == 1:
        yield f"zero={options.zero}", "there is 1 data rank; fully_shard shards over data ranks"
    if "count" in recipe.sources and data > 1:
        yield "count", "ranks average their losses, however many terms each of them has"
    if recipe.batch_size % data:
        yield (
            f"{data} data ranks",
            f"a batch of {recipe.batch_size} does not divide by them: torch averages equal parts",
        )


def _styles(recipe: Recipe, num_parts: int) -> list[tuple[str, str]]:
    """The styles of the split layers. A row takes the columns before it as they are where that gives its result."""
    assert recipe.resolved is not None
    styles: dict[str, str] = {}
    columns: list[str] = []
    for choice in recipe.resolved.layers if num_parts > 1 else ():
        if choice.split is None:
            continue
        if choice.kind == TABLE:  # takes whole ids
            how = "input_layouts=Replicate()" if choice.split == "row" else "output_layouts=Replicate()"
            styles[choice.name] = f"{'Row' if choice.split == 'row' else 'Col'}wiseParallel({how})"
        elif choice.split == "column":
            styles[choice.name] = "ColwiseParallel(output_layouts=Replicate())"
            columns.append(choice.name)
        else:
            is_pair = bool(columns) and _is_pair(recipe, columns, choice.name, num_parts)
            styles[choice.name] = "RowwiseParallel()" if is_pair else "RowwiseParallel(input_layouts=Replicate())"
            styles |= dict.fromkeys(columns, "ColwiseParallel()") if is_pair else {}
            columns = []
    return list(styles.items())


def _is_pair(recipe: Recipe, columns: list[str], row: str, num_parts: int) -> bool:
    """Tried on two samples. Without a data set, columns are gathered, which is always right."""
    if recipe.first_samples is None:
        return False
    from workbench.training.batches import call
    from workbench.training.strategies.paired_splits import takes_columns

    model, batch = recipe.model_with_data, recipe.first_batch
    layers: list[Any] = [model.get_submodule(name) for name in (*columns, row)]
    return takes_columns(lambda: call(model, batch.inputs), layers[:-1], layers[-1], num_parts)


def _has_unused(recipe: Recipe) -> bool:
    """Whether parameters get no gradient. Tried on two samples; a model that does not run on them says it by itself."""
    loss_fn = recipe.sources.get("loss_fn")
    if recipe.first_samples is None or (loss_fn is not None and loss_fn.value is None):
        return False
    import torch

    from workbench.tensors import default_generator

    model = recipe.model_with_data
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with default_generator.restored():
            loss = recipe.first_batch.loss(model, None if loss_fn is None else loss_fn.value)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception:  # noqa: BLE001 - the user's model may need a GPU, or more samples
        return False
    return any(gradient is None for gradient in gradients)


def _units(recipe: Recipe) -> list[str]:
    """The repeated blocks; of a chain of layers each layer, but for those that share a weight."""
    from workbench.training.recompute import blocks_of

    assert recipe.model is not None
    assert recipe.layers is not None
    names = {module: name for name, module in recipe.model.named_modules()}
    tied = {layer.tied_to for layer in recipe.layers} | {layer.name for layer in recipe.layers if layer.tied_to}
    return [names[block] for block in blocks_of(recipe.model) if names[block] and names[block] not in tied]
