"""The choices of a strategy in plain words: the comments of a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap

from workbench.core.rows import Layer, Row
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.session.scripts.sources import WIDTH

_SPLITS = {
    "column": "the model ranks share out the output features of {}",
    "row": "the model ranks share out the input features of {}, and add up their results",
    "expert": "ranks share out the experts of {} by their number, and tokens travel to them",
}
_CHOICES = {
    "data": "every rank has the whole weight and takes a part of the batch",
    "model": "the model ranks share out the weight, and each takes the whole batch of its replica",
    "model:column": "the model ranks share out the output features",
    "model:row": "the model ranks share out the input features, and add up their results",
    "expert": "ranks share out the experts by their number, and tokens travel to them",
}
_OPTIONS = {
    r"(\d+)x(\d+)x(\d+)": "degrees: pipeline stages {0}, data ranks {1}, model ranks {2}",
    r"\d+x\d+\+.*": "data x model ranks of each pipeline stage",
    r"mb=(\d+)": "a step cuts its batch into {0} micro-batches",
    "gpipe": "the schedule: all forwards of a step, then all backwards",
    "1f1b": "the schedule: a stage alternates forwards and backwards, and holds few micro-batches",
    "interleaved": "the schedule: a rank has several stages, which shortens the wait at both ends of a step",
    "zero_bubble": "the schedule: backwards of weights fill the wait at the end of a step",
    "zero_bubble_v": "the schedule: a rank has two stages, in a V, and backwards of weights fill the waits",
    "dualpipe_v": "the schedule: a rank has two stages, in a V: a forward of one, a backward of the other by turns",
    "zero=1": "data ranks share out the optimizer's state",
    "zero=2": "data ranks share out the optimizer's state and the gradients",
    "zero=3": "data ranks share out parameters, gradients and the optimizer's state",
    r"shards=(\d+)": "... within groups of {0} data ranks; the groups hold copies",
    r"context=(\d+)": "{0} data ranks take the same samples, and each a slice of their sequence",
    "recompute": "blocks keep their inputs only, and run again in backward",
    "recompute=cheap": "blocks keep what takes long to compute, and run the rest again in backward",
    "recompute=attention": "blocks run again in backward, without their products with weights",
    r"recompute=(\d+)": "{0} blocks keep their inputs only, and run again in backward",
    "offload=optimizer": "the optimizer's state lies in host memory (on CPUs in files) between updates",
    "offload=activations": "what forward keeps for backward lies in host memory (on CPUs in files) meanwhile",
    r"offload=optimizer\+activations": "the optimizer's state and activations lie in host memory (on CPUs in files)",
    "sequence": "between model-parallel layers, each model rank holds a slice of the sequence",
    r"overlap=(\d+)": "row-split layers compute {0} pieces of rows, and sum one while they compute the next",
    "bf16": "forward computes in bfloat16, by autocast",
    "fp8": "linear layers multiply numbers of 8 bits, and all else in forward computes in bfloat16",
    "fp16": "forward computes in float16, by autocast; small gradients need torch.amp.GradScaler",
}


def option_words(option: str) -> str:
    """What an option does.

    >>> option_words("mb=4")
    'a step cuts its batch into 4 micro-batches'
    """
    found = ((re.fullmatch(pattern, option), text) for pattern, text in _OPTIONS.items())
    return next(text.format(*match.groups()) for match, text in found if match)


def row_words(row: Row, layers: Sequence[tuple[str, str | None]] | None) -> str:
    """What a row does. ``layers`` are those that it decides, with their splits; None if the model is not known.

    >>> row_words(Row("fc*", "model"), [("fc1", "column")])
    'the model ranks share out the output features of fc1'
    """
    if layers is not None and not layers:
        return "no layer: later rows decide"
    words = _CHOICES[row.parallel + (f":{row.split}" if row.split else "")]
    if row.parallel == "model" and layers:
        by_split = {split: [name for name, own in layers if own == split] for split in _SPLITS}
        parts = [_SPLITS[split].format(names_text(names)) for split, names in by_split.items() if names]
        whole = [name for name, split in layers if split is None]
        parts += [f"every rank has {names_text(whole)} whole"] if whole else []
        words = "; ".join(parts)
    return words if row.stage is None else f"pipeline stage {row.stage}; {words}"


def names_text(names: Sequence[str]) -> str:
    """The first few of some names.

    >>> names_text(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def rows_with_words(
    strategy: Strategy, layers: Sequence[Layer] | None, resolved: ResolvedStrategy | None
) -> list[tuple[str, str]]:
    """Each row's text, and what it does."""
    if layers is None or resolved is None:
        return [(str(row), row_words(row, None)) for row in strategy.rows]
    decided: dict[Row, list[tuple[str, str | None]]] = {}
    for row, choice in zip(strategy.rows_of(layers), resolved.layers, strict=True):
        decided.setdefault(row, []).append((choice.name, choice.split))
    return [(str(row), row_words(row, decided.get(row, []))) for row in strategy.rows]


def options_with_words(strategy: Strategy) -> list[tuple[str, str]]:
    """Each option's text, and what it does."""
    return [(option, option_words(option)) for option in str(strategy.options).split()]


def comment(text: str, indent: int = 4) -> list[str]:
    """A text as lines of comment."""
    return [f"{' ' * indent}# {line}" for line in wrap(text, WIDTH - indent - 2)]


def quoted(text: str) -> str:
    """A text as formatters write it in Python: in double quotes, if it has none.

    >>> print(quoted("head"), quoted('say "hi"'))
    "head" 'say "hi"'
    """
    written = repr(text)
    return written if '"' in written else f'"{written[1:-1]}"'


def list_of(name: str, entries: Sequence[tuple[str, str]]) -> str:
    """A list of texts, each below a comment.

    >>> print(list_of("ROWS", [("*: data", "every rank has all")]))
    ROWS = [
        # every rank has all
        "*: data",
    ]
    """
    lines = [line for text, words in entries for line in (*comment(words), f"    {quoted(text)},")]
    return "\n".join([f"{name} = [", *lines, "]"])
