"""Names of layers that are allowed, and seldom."""

from __future__ import annotations

import random


def odd_names(rng: random.Random) -> list[str]:
    """Layers of a random tree of modules. Names may be what Python allows: numbers of any width, and any letters."""
    letters = [
        "a",
        "b",
        ":",
        ";",
        "|",
        "*",
        "[",
        "]",
        "-",
        "@",
        "%",
        "%3B",
        "?",
        "{",
        ",",
        " ",
        "\n",
        "'",
        "1",
        "\u0663",
    ]
    width = rng.randint(1, 3)
    start = rng.choice([0, 1, 8, 98])
    parts = [f"{n:0{rng.choice([width, width, 1])}d}" for n in range(start, start + 12)]
    parts += ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(8)]
    parts += ["[0-3]", "data", "expert", "model:column", "x: model", "en:de"]
    trees = [[part for part in dict.fromkeys(parts) if rng.random() < 0.7] for _ in range(2)]
    names = {f"{one}.{two}" if rng.random() < 0.8 else one: None for one in trees[0] for two in trees[1]}
    return list(names)
