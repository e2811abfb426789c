"""What ``*: model`` alone costs in unmodified models: one sum per pair of layers, and the words stay split."""

from collections import Counter

import pytest

import workbench as wb
from tests.models.zoo import batch_for, make
from workbench.testing import run_ranks

PAIRS = {"gpt2": ["c_proj", "c_proj"], "llama": ["o_proj", "down_proj"]}
"""The row-split layers of a block."""
HIDDEN = 4 * 5 * 7 * 24
"""Bytes of the hidden states: samples, words, width."""


def boxings(name, strategy, num_ranks=2):
    """(direction, change, function) -> (how often, bytes on the wire), of what moved, on each rank."""
    models, batch = [make(name, "sdpa") for _ in range(num_ranks)], batch_for(name)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        with wb.debug.trace() as trace:
            model(**batch).loss.backward()
        found: dict = {}
        for record in trace.records:
            if record.wire_bytes:
                key = (record.direction, record.change, record.function.rpartition(".")[2])
                before = found.get(key, (0, 0))
                found[key] = (before[0] + record.num_boxings, before[1] + record.wire_bytes)
        return found

    return run_ranks(program, num_ranks)


@pytest.mark.parametrize("name", PAIRS)
def test_one_sum_per_pair_of_layers_and_split_words(name):
    rows = Counter(2 * PAIRS[name])
    sums = {("forward", "P -> B", row): (count, 2 * count * HIDDEN) for row, count in rows.items()}
    if name == "gpt2":  # its table is its head too, so both are split by words
        sums["forward", "P -> B", "wte"] = (1, 2 * HIDDEN)
        sums["forward", "S(2) -> B", "wpe"] = (1, 2 * HIDDEN // 5 // 2)
    else:
        sums["forward", "S(2) -> B", "embed_tokens"] = (1, HIDDEN)
    for found in boxings(name, "*: model"):
        of_loss = {key: found.pop(key) for key in list(found) if key[2] == "cross_entropy"}
        assert of_loss.keys() == {("forward", "P -> B", "cross_entropy"), ("forward", "P(max) -> B", "cross_entropy"),
                                  ("backward", "P -> B", "cross_entropy")}  # fmt: skip
        assert sum(num_bytes for _, num_bytes in of_loss.values()) < HIDDEN, "the logits have moved"
        # Queries, keys and values of gpt2 lie side by side in one weight: halves of it are not heads.
        mixed = [found.pop(key) for key in list(found) if key[2] == "split"]
        assert [num_bytes for _, num_bytes in mixed] == ([2 * HIDDEN] * 2 if name == "gpt2" else [])
        assert {key: value for key, value in found.items() if key[0] == "forward"} == sums
        assert sum(value[1] for value in found.values()) == 2 * sum(value[1] for value in sums.values())


def test_sequence_splits_every_sum_in_two():
    for found in boxings("llama", "*: model | 1x1x2 sequence"):
        forward = {(change, function): value for (direction, change, function), value in found.items()
                   if direction == "forward" and function != "cross_entropy"}  # fmt: skip
        assert forward == {
            **{("P -> S(1)", row): (2, 2 * HIDDEN) for row in PAIRS["llama"]},
            **{("S(1) -> B", column): (2, 2 * HIDDEN) for column in ("q_proj", "gate_proj")},
            ("S(1) -> B", "lm_head"): (1, HIDDEN),
            ("S(2) -> S(1)", "embed_tokens"): (1, HIDDEN // 2),
        }
