"""A script that trains with the workbench, under torchrun."""

from __future__ import annotations

from workbench.session.scripts.recipe import Recipe
from workbench.session.scripts.sources import imports_of
from workbench.session.scripts.words import list_of, options_with_words, rows_with_words

_CHECKPOINTS = """
CHECKPOINTS = Path(__file__).with_suffix(".checkpoints")  # all ranks share it
SAVE_EVERY = 50  # steps; a script that starts again goes on from the newest"""
_MAIN = """\
def main() -> None:
    wb.init()  # joins the world that torchrun made
    random.seed(SEED)  # the same weights and samples on every rank
    np.random.seed(SEED % 2**32)
    torch.manual_seed(SEED)
    model = wb.parallelize(model_fn(), STRATEGY)
    optimizer = {optimizer}
    # Each rank reads the samples that it needs, in an order that is the same everywhere.
    loader = wb.GlobalDataLoader(
        {dataset},
        batch_size=BATCH_SIZE,
        module=model,
        shuffle=True,
        seed=SEED,
    )
    torch.manual_seed(SEED)  # of dropout, which wb.compare seeds alike
    checkpoints = wb.checkpoint.Checkpoints(CHECKPOINTS, keep=2)
    found = checkpoints.load(model=model, optimizer=optimizer, loader=loader)
    step = found["step"] if found else 0
    if found and wb.rank() == 0:
        print(f"continues at step {step} of {STEPS} from {CHECKPOINTS}", flush=True)
        if step >= STEPS:
            print("nothing left to do: raise STEPS, or remove the folder to begin anew")
    while step < STEPS:
        for {batch} in loader:
            optimizer.zero_grad()
            # Forward and backward of all micro-batches: the loss is that of the batch.
            loss = wb.forward_backward({call})
            optimizer.step()
            step += 1
            value = loss.item()  # all ranks take part
            if wb.rank() == 0:
                print(f"step {step}  loss {value:.8g}", flush=True)
            if step % SAVE_EVERY == 0 or step == STEPS:
                checkpoints.save(step, model=model, optimizer=optimizer, loader=loader)
            if step == STEPS:
                break


if __name__ == "__main__":
    main()
"""


def workbench_script(recipe: Recipe) -> str:
    """The text of the script. Parts that are not known have a place to fill in."""
    options = options_with_words(recipe.strategy)
    blocks = [
        recipe.head("Trains with the workbench: each layer lies on the ranks as the strategy says."),
        "import random\nfrom pathlib import Path",
        imports_of(recipe.sources.values(), ["import numpy as np", "import torch", "import workbench as wb"], {}),
        recipe.numbers + _CHECKPOINTS,
        "# The last row that matches a layer decides it.\n"
        + list_of("ROWS", rows_with_words(recipe.strategy, recipe.layers, recipe.resolved)),
        list_of("OPTIONS", options) if options else "",
        'STRATEGY = "; ".join(ROWS)' + (' + " | " + " ".join(OPTIONS)' if options else ""),
        *recipe.places,
    ]
    return "\n\n".join(block for block in blocks if block) + "\n\n\n" + _main(recipe)


def _main(recipe: Recipe) -> str:
    parts = {
        "{optimizer}": recipe.optimizer,
        "{dataset}": recipe.dataset_text,
        "        seed=SEED,\n": "        seed=SEED,\n"
        + (f"        {recipe.collate_text},\n" if recipe.collate_text else ""),
        "{batch}": _batch(recipe),
        "{call}": _call(recipe) + (", count=count" if "count" in recipe.sources else ""),
    }
    text = _MAIN
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _has_targets(recipe: Recipe) -> bool:
    """Whether targets are the last entry of a batch, as for ``Batch.of``."""
    return "loss_fn" in recipe.sources and not recipe.is_dict and recipe.num_entries > 1


def _batch(recipe: Recipe) -> str:
    """The variables of a batch."""
    if not _has_targets(recipe):
        return "batch"
    return "inputs, targets" if recipe.num_entries == 2 else "*inputs, targets"


def _call(recipe: Recipe) -> str:
    """The arguments of ``wb.forward_backward``."""
    if "loss_fn" not in recipe.sources:
        return "model, inputs=batch"
    if not _has_targets(recipe):
        return "model, loss_fn, batch"
    return f"model, loss_fn, {'inputs' if recipe.num_entries == 2 else 'tuple(inputs)'}, targets"
