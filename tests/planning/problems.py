"""Random small problems: a few layers of odd sizes, a made-up machine, a memory that is sometimes too small."""

from __future__ import annotations

import random

from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.cost.hardware import Hardware, Link
from workbench.planning.problem import OBJECTIVES, Constraints, Problem


def linear(name: str, inputs: int, outputs: int, samples: int = 1, after: tuple[OpCost, ...] = ()) -> LayerCost:
    """A layer on ``samples`` positions of each sample."""
    layer = Layer(name, "Linear", {"weight": (outputs, inputs), "bias": (outputs,)}, outputs * inputs + outputs)
    moved = 4.0 * samples * (inputs + outputs)
    own = OpCost("linear", 2.0 * samples * inputs * outputs, moved, inputs, 4.0 * samples * inputs)
    shape = (outputs,) if samples == 1 else (samples, outputs)
    return LayerCost(layer, (own,), after, Extent(shape))


def norm(name: str, width: int, samples: int = 1) -> LayerCost:
    """A layer norm."""
    layer = Layer(name, "LayerNorm", {"weight": (width,), "bias": (width,)}, 2 * width)
    size = 4.0 * samples * width
    extent = Extent((width,) if samples == 1 else (samples, width))
    return LayerCost(layer, (OpCost("layer_norm", 0, 2 * size, 0, size),), (), extent)


def gelu(width: int, samples: int = 1) -> OpCost:
    """An activation function."""
    return OpCost("gelu", 0, 8.0 * samples * width, 0, 4.0 * samples * width)


def table(name: str, words: int, width: int, samples: int) -> LayerCost:
    """An embedding."""
    layer = Layer(name, "Embedding", {"weight": (words, width)}, words * width)
    own = OpCost("embedding", 0, 8.0 * samples * width, 0, 8.0 * samples)
    return LayerCost(layer, (own,), (), Extent((samples, width)))


def machine(random_: random.Random, memory_bytes: float = 1e12) -> Hardware:
    """Rates such that compute, memory and links all matter."""
    links = (Link(2, 1e-6, random_.choice([1e8, 1e10])), Link(1024, 1e-5, random_.choice([1e7, 1e9])))
    return Hardware(
        "made up",
        memory_bytes,
        random_.choice([1e9, 1e11]),
        {"fp32": random_.choice([1e10, 1e12]), "bf16": 2e12},
        random_.choice([0.0, 64.0]),
        random_.choice([0.0, 1e-6]),
        links,
        alone_speedup=random_.choice([1.0, 1.0, 2.0]),
    )


def random_problem(seed: int) -> Problem:
    """The same for the same seed."""
    random_ = random.Random(seed)
    positions = random_.choice([1, 1, 7])
    rows: list[LayerCost] = []
    width = random_.choice([8, 33, 128])
    if positions > 1 and random_.random() < 0.4:
        rows.append(table("words", random_.choice([10, 500]), width, positions))
    for index in range(random_.choice([2, 2, 3]) - len(rows) // 2):
        if random_.random() < 0.25:
            rows.append(norm(f"norm{index}", width, positions))
            continue
        outputs = random_.choice([5, 64, 256])
        after = (gelu(outputs, positions),) if random_.random() < 0.5 else ()
        rows.append(linear(f"fc{index}", width, outputs, positions, after))
        width = outputs
    num_ranks = random_.choice([2, 3, 4])
    constraints = Constraints(
        micro_batches=random_.choice([(1, 2), (1, 4), (2,)]),
        zero=random_.choice([None, (0, 1), (0, 3), 2]) if num_ranks != 3 else (0, 1),
        recompute=random_.choice([None, False]),
        schedule=random_.choice([None, ("1f1b", "interleaved"), ("gpipe", "zero_bubble")]),
    )
    if constraints.zero == 2:
        constraints = Constraints(micro_batches=(1, 2))
    parameters = sum(row.layer.num_parameters for row in rows)
    memory = parameters * 16.0 * random_.choice([0.15, 0.3, 0.5, 0.8, 1.2, 100.0]) + random_.choice(
        [0.0, 4e3, 4e4, 4e6]
    )
    return Problem(
        ModelCosts(tuple(rows), (width,)),
        machine(random_, memory),
        num_ranks,
        random_.choice([4, 8, 12]),
        random_.choice(OBJECTIVES),
        memory,
        optimizer=random_.choice(["adamw", "sgd"]),
        constraints=constraints,
    )
