"""``python -m tests.zoo``: every model under every strategy, and the page of what came of it.

python -m tests.zoo                     all, afresh
python -m tests.zoo --goes-on           only those that ``--lines`` has no result of
python -m tests.zoo gpt2 resnet         those whose names contain one of these words; prints, and writes no page
"""

import argparse
import importlib.metadata
import random
from pathlib import Path

import torch

from tests.zoo import of_other_libraries, of_transformers
from tests.zoo.judge import STRATEGIES, TOLERANCE
from tests.zoo.page import read_rows, write_page
from tests.zoo.sweep import outcomes, sweep

LIBRARIES = ("torch", "transformers", "timm", "torchvision", "peft", "diffusers", "sentence-transformers")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--lines", type=Path, default=Path("out/zoo.jsonl"), help="results, one line per model")
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--goes-on", action="store_true")
    parser.add_argument("--page-only", action="store_true")
    args = parser.parse_args()
    args.lines.parent.mkdir(exist_ok=True)
    if not (args.goes_on or args.page_only):
        args.lines.unlink(missing_ok=True)
    rows = read_rows(args.lines) if args.lines.exists() else []
    if not args.page_only:
        torch.set_num_threads(1)
        list(outcomes(next(of_transformers.models())))  # what every process needs is loaded before they are forked
        models = [*of_transformers.models(), *of_other_libraries.models()]
        done = {(row["library"], row["name"]) for row in rows}
        chosen = [m for m in models if (m.library, m.name) not in done and _has_one_of(m.name, args.words)]
        random.Random(0).shuffle(chosen)  # a part of the sweep is a sample of it
        sweep(chosen, args.lines, args.strategies, args.processes)
    if not args.words and args.strategies == list(STRATEGIES):
        write_page(read_rows(args.lines), args.page, _versions(), TOLERANCE)


def _has_one_of(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
