"""A script that trains with torch alone, under torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import RunError
from workbench.session.scripts.recipe import Recipe
from workbench.session.scripts.sources import imports_of
from workbench.session.scripts.torch_plan import TorchPlan, torch_plan
from workbench.session.scripts.words import comment, options_with_words, quoted, rows_with_words

_STYLE_WORDS = {
    "ColwiseParallel()": "a part of the output features, which stay where they are",
    "ColwiseParallel(output_layouts=Replicate())": "a part of the output features, gathered behind the layer",
    "RowwiseParallel()": "the input features that are here; the results are added up",
    "RowwiseParallel(input_layouts=Replicate())": "a part of the input features (a table: its rows), added up",
}
_STANDARD = """\
import os
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

"""
_TRAIN = """\
def seed_all(seed: int) -> None:
    \"\"\"Seed all random numbers: of Python, numpy and torch.\"\"\"
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def batches(samples: Any, part: int, num_parts: int) -> Iterator[Any]:
    \"\"\"One part of each batch, epoch after epoch, in the order of the workbench.\"\"\"
    num_samples = len({counted})
    generator = torch.Generator().manual_seed(SEED)
    if num_samples < BATCH_SIZE:
        raise ValueError(f"BATCH_SIZE is {BATCH_SIZE}, of {num_samples} samples")
    while True:
        order = torch.randperm(num_samples, generator=generator)
        # Gradients are averaged over ranks, so parts are equal: the rest is left out.
        whole = [rows for rows in order.split(BATCH_SIZE) if len(rows) == BATCH_SIZE]
        own = [rows.chunk(num_parts)[part].tolist() for rows in whole]
        {yields}


def on_device(batch: Any, device: torch.device) -> Any:
    \"\"\"The batch, with its tensors on the device.\"\"\"
    if isinstance(batch, Mapping):
        return {name: on_device(entry, device) for name, entry in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [on_device(entry, device) for entry in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch


def main() -> None:
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        number = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    seed_all(SEED)  # the same weights and samples on every rank
    model = parallelize(model_fn().to(device), device)
    optimizer = {optimizer}
    samples = {samples}
{foreach}    part = dist.get_rank(){model}
    seed_all(SEED + 1 + part)  # other parts of a batch have other dropout
    own_batches = batches(samples, part, num_parts={replicas})
    for step, batch in enumerate(islice(own_batches, STEPS), 1):
        batch = on_device(batch, device)
{forward}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach().clone()
        dist.all_reduce(value)  # for the log: the mean over all parts
        if dist.get_rank() == 0:
            mean = value.item() / dist.get_world_size()
            print(f"step {step}  loss {mean:.8g}", flush=True)
    dist.barrier()  # no rank ends while others wait for it


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model, whose end would wait for a thread of gloo that waits for Python
    print(end="", flush=True)
    os._exit(0)  # a thread of gloo that holds a tensor would abort Python's end
"""
_OWN_LOSS = """\
def loss_of(output: Any) -> torch.Tensor:
    \"\"\"The loss that the model returns: alone, as ``loss``, or as the scalar of a tuple.\"\"\"
    if isinstance(output, Mapping):
        return output["loss"]
    if isinstance(output, (list, tuple)) and not hasattr(output, "loss"):
        return next(entry for entry in output if torch.is_tensor(entry) and entry.dim() == 0)
    return getattr(output, "loss", output)


"""
_LISTS = """\
def as_arrays(sample: Any) -> Any:
    \"\"\"The sample, with tensors for its lists of numbers.\"\"\"
    if isinstance(sample, Mapping):
        return {name: as_arrays(entry) for name, entry in sample.items()}
    if isinstance(sample, tuple):
        return tuple(as_arrays(entry) for entry in sample)
    return torch.as_tensor(sample) if isinstance(sample, list) else sample


def collate_fn(samples: list[Any]) -> Any:
    \"\"\"A batch.\"\"\"
    return default_collate([as_arrays(sample) for sample in samples])


"""
_FOREACH = """\
    for group in optimizer.param_groups:
        group["foreach"] = False  # split and whole parameters cannot share a launch
"""
_DDP_UNUSED = "    return DistributedDataParallel(model, find_unused_parameters=True)"
_NORMS = """\
    if device.type == "cuda":  # statistics of the whole batch, as on one device
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""


def torch_script(recipe: Recipe) -> str:
    """The text of the script.

    Raises:
        StrategyError: the strategy has parts without an equivalent in torch.
        RunError: the data set has nested arrays.
    """
    plan = torch_plan(recipe)
    _check_samples(recipe.samples)
    recipe = replace(recipe, sources={role: source for role, source in recipe.sources.items() if role != "count"})
    note = "" if plan.axes.get("model", 1) == 1 else _MODEL_NOTE
    blocks = [
        recipe.head("Trains with torch alone: each layer lies on the ranks as the strategy says.", note),
        _imports(recipe, plan),
        recipe.numbers,
        *recipe.places,
    ]
    return (
        "\n\n".join(block for block in blocks if block)
        + f"\n\n\n{_parallelize(recipe, plan)}\n\n{_train(recipe, plan)}"
    )


def _check_samples(samples: Any) -> None:
    arrays = samples.values() if isinstance(samples, Mapping) else samples if isinstance(samples, tuple) else ()
    nested = sorted({type(entry).__name__ for entry in arrays if isinstance(entry, (Mapping, tuple))})
    if nested:
        raise RunError(
            f'script(library="torch"): the data set of {len(samples)} arrays has a {", a ".join(nested)} beside its '
            "arrays. The script takes no nested ones: give a list of samples or a Dataset."
        )


_MODEL_NOTE = """

Layers of which nothing is split are computed alike by all model ranks. (The workbench
shares out the samples there; the numbers are the same.)"""


def _imports(recipe: Recipe, plan: TorchPlan) -> str:
    """All imports, in their three blocks."""
    text = " ".join(style for _, style in plan.styles)
    styles = [name for name in ("ColwiseParallel", "RowwiseParallel") if name in text]
    wanted = {
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ["checkpoint_wrapper"] * _recomputes(recipe),
        "torch.distributed.device_mesh": ["init_device_mesh"] * _has_mesh(plan),
        "torch.distributed.fsdp": ["fully_shard"] * plan.is_sharded,
        "torch.distributed.tensor": ["Replicate"] * ("Replicate" in text),
        "torch.distributed.tensor.parallel": [*styles, "parallelize_module"] if styles else [],
        "torch.nn.parallel": ["DistributedDataParallel"] * _is_replicated(plan),
        "torch.utils.data": ["DataLoader"] * (not _is_columns(recipe)) + ["default_collate"] * _has_lists(recipe),
    }
    libraries = {module: names for module, names in wanted.items() if names}
    plain = ["import numpy as np", "import torch", "import torch.distributed as dist"]
    return _STANDARD + imports_of(recipe.sources.values(), plain, libraries)


def _has_mesh(plan: TorchPlan) -> bool:
    return plan.is_sharded or plan.axes.get("model", 1) > 1


def _recomputes(recipe: Recipe) -> bool:
    return bool(recipe.strategy.options.recompute)


def _is_replicated(plan: TorchPlan) -> bool:
    return plan.axes.get("data", 1) > 1


def _parallelize(recipe: Recipe, plan: TorchPlan) -> str:
    """The function that does to the model what the strategy says."""
    lines = ["def parallelize(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:"]
    lines += ['    """The model under the strategy."""']
    for text, words in (
        *rows_with_words(recipe.strategy, recipe.layers, recipe.resolved),
        *options_with_words(recipe.strategy),
    ):
        lines += comment(f"{text} -- {words}")
    if _has_mesh(plan):
        names = ", ".join(f'"{name}"' for name in plan.axes) + ("," if len(plan.axes) == 1 else "")
        lines += [f"    sizes = {tuple(plan.axes.values())}", f"    names = ({names})"]
        lines += ["    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)"]
    lines += _norms(recipe, plan)
    if plan.styles:
        lines += ["    styles = {"]
        for name, style in plan.styles:
            lines += [*comment(_STYLE_WORDS[style], 8), f"        {quoted(name)}: {style},"]
        lines += ["    }", '    parallelize_module(model, mesh["model"], styles)']
    units = [f"        {quoted(name)}," for name in plan.units]
    if units and (plan.is_sharded or _recomputes(recipe)):
        lines += ["    units = [", *units, "    ]"]
    if units and _recomputes(recipe):
        lines += ["    for name in units:"]
        lines += ["        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))"]
    if plan.is_sharded:
        lines += _fully_shard(plan)
    if _is_replicated(plan):
        if plan.has_unused:
            lines += ["    # Some parameters get no gradient, for which it would wait.", _DDP_UNUSED, ""]
        else:
            lines += ["    return DistributedDataParallel(model)  # averages the gradients", ""]
    else:
        lines += ["    return model", ""]
    return "\n".join(lines)


def _norms(recipe: Recipe, plan: TorchPlan) -> list[str]:
    assert recipe.layers is not None
    has_norms = any(layer.kind.startswith("BatchNorm") for layer in recipe.layers)
    return [_NORMS.rstrip()] if has_norms and plan.num_replicas > 1 else []


def _fully_shard(plan: TorchPlan) -> list[str]:
    """ZeRO over the data ranks. Copies of whole parameters are groups of one shard."""
    axes = [axis for axis in plan.axes if axis != "model"]
    mesh = "mesh[" + ", ".join(f'"{axis}"' for axis in axes) + "]"
    lines = [f"    data_mesh = {mesh}"]
    if plan.keeps_whole:
        lines += ["    # Parameters stay whole from a forward to its backward.", "    again = False"]
    elif plan.axes["shard"] == 1:
        lines += ["    # Each shard is whole: ranks hold copies.", "    again = False"]
    else:
        lines += ["    # Parameters are gathered for a forward, and again for its backward.", "    again = True"]
    if plan.units:
        lines += ["    for name in units:"]
        lines += ["        unit = model.get_submodule(name)"]
        lines += ["        fully_shard(unit, mesh=data_mesh, reshard_after_forward=again)"]
    return [*lines, "    fully_shard(model, mesh=data_mesh, reshard_after_forward=again)"]


def _train(recipe: Recipe, plan: TorchPlan) -> str:
    model = plan.axes.get("model", 1)
    parts = {
        **_columns(recipe),
        "{optimizer}": recipe.optimizer,
        "{foreach}": _FOREACH if plan.styles else "",
        "{model}": f" // {model}  # model ranks take the same samples" if model > 1 else "",
        "{replicas}": str(plan.num_replicas),
        "{forward}": _forward(recipe),
    }
    own_loss = "" if "loss_fn" in recipe.sources else _OWN_LOSS
    text = _LISTS * _has_lists(recipe) + own_loss + _TRAIN
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _is_columns(recipe: Recipe) -> bool:
    """Whether the data set is all samples in arrays, of which a batch is some rows."""
    return isinstance(recipe.samples, (tuple, Mapping))


def _has_lists(recipe: Recipe) -> bool:
    """Whether samples have lists of numbers, of which torch makes a tensor for each place."""
    if recipe.first_samples is None or _is_columns(recipe) or "collate_fn" in recipe.sources:
        return False
    from torch.utils._pytree import tree_leaves

    return len(tree_leaves(recipe.samples[0])) != len(tree_leaves(recipe.first_samples))


def _columns(recipe: Recipe) -> dict[str, str]:
    """How the script takes samples: what it keeps, what has a row for each, and how a part of a batch is made."""
    from workbench.training.datasets import columns_of, is_table, num_samples_of

    name = recipe.dataset_text
    collate = ", collate_fn=collate_fn" if recipe.collate_text or _has_lists(recipe) else ""
    if not _is_columns(recipe):
        made = f"yield from DataLoader(samples, batch_sampler=own{collate})"
        return {"{samples}": name, "{counted}": "samples", "{yields}": made}
    columns, num_samples = columns_of(recipe.samples), num_samples_of(recipe.samples)
    is_dict = isinstance(columns, dict)
    named = columns if is_dict else dict(enumerate(columns))
    texts = {key: quoted(str(key)) if is_dict else str(key) for key in named}
    cut = [key for key, column in named.items() if column.dim() and len(column) == num_samples]
    shared = [texts[key] for key in named if key not in cut]
    given = recipe.samples.values() if is_dict else recipe.samples
    tensor = f"torch.as_tensor({'np.array(column)' if any(map(is_table, given)) else 'column'})"
    if is_dict:
        kept = f"{{name: {tensor} for name, column in {name}.items()}}"
        lines = ["for rows in own:", "    yield {name: column[rows] for name, column in samples.items()}"]
        if shared:
            lines = [f"shared = [{', '.join(shared)}]  # goes whole to each batch", lines[0]]
            lines += ["    cut = {name: samples[name][rows] for name in samples if name not in shared}"]
            lines += ["    yield {**samples, **cut}"]
    else:
        kept = f"[{tensor} for column in {name}]"
        entries = ", ".join(f"samples[{key}]" + "[rows]" * (key in cut) for key in named)
        lines = ["for rows in own:", f"    yield [{entries if shared else 'column[rows] for column in samples'}]"]
    made = "\n        ".join(lines)
    return {"{samples}": kept, "{counted}": f"samples[{texts[cut[0]]}]", "{yields}": made}


def _forward(recipe: Recipe) -> str:
    """The lines that compute the loss of a batch."""
    split, call = _split(recipe)
    forward = [f"output = {call}"]
    if recipe.strategy.options.precision == "bf16":
        forward = ["with torch.autocast(device.type, torch.bfloat16):", f"    output = {call}"]
    result = "loss = loss_fn(output, targets)" if "loss_fn" in recipe.sources else "loss = loss_of(output)"
    return "\n".join(f"        {line}" for line in (*split, *forward, result))


def _split(recipe: Recipe) -> tuple[list[str], str]:
    """The line that takes the targets out of a batch, as ``Batch.of`` does, and the call of the model."""
    from workbench.training.batches import TARGET_KEYS

    batch = recipe.first_samples
    if "loss_fn" not in recipe.sources:
        return [], _call("batch", {} if batch is None else batch)
    if isinstance(batch, dict):
        names = [name for name in batch if name in TARGET_KEYS]
        several = ", ".join(f'"{name}"' for name in names)
        found = f"{{name: batch.pop(name) for name in ({several})}}" if len(names) > 1 else f"batch.pop({several})"
        return [f"targets = {found if names else None}"], _call("batch", batch)
    if batch is None or (isinstance(batch, (list, tuple)) and len(batch) > 1):
        if batch is not None and len(batch) == 2 and isinstance(batch[0], (dict, list, tuple)):
            return ["inputs, targets = batch"], _call("inputs", batch[0])
        return ["*inputs, targets = batch"], "model(*inputs)"
    return ["targets = None"], _call("batch", batch)


def _call(name: str, inputs: Any) -> str:
    """The model's call with a variable that has these inputs."""
    stars = "**" if isinstance(inputs, dict) else "*" if isinstance(inputs, (list, tuple)) else ""
    return f"model({stars}{name})"
