"""Every kernel compiles for a GPU with the arguments of its launcher; this needs no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.kernels.launch import has_triton

ROOT = Path(__file__).parents[2]
OTHERS = ["80", "100", "120"]
"""Beside Hopper: Ampere, and Blackwell in servers and at home."""


@pytest.fixture
def cache(request, tmp_path):
    """Where Triton keeps what it has compiled, from run to run, by the source, arguments and versions."""
    kept = getattr(request.config, "cache", None)
    return kept.mkdir("kernels") if kept is not None else tmp_path


def compiled(cache, *arguments):
    if not has_triton():
        pytest.skip("Triton is not installed (it exists for Linux only)")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/compile_kernels.py", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LIMITS = {
    "attention_dropout:_forward": 118,
    "attention_dropout:_backward_queries": 133,
    "attention_dropout:_backward_keys": 132,
    "blocks:_move": 24,
    "blocks:_move sum of 2": 19,
    "cross_entropy_terms:_forward": 26,
    "cross_entropy_terms:_backward": 21,
    "embedding_rows:_forward": 13,
    "embedding_rows:_backward": 40,
    "random_slice:_fill dropout": 24,
    "random_slice:_fill dropout columns": 26,
    "random_slice:_fill dropout odd columns": 42,
    "random_slice:_fill dropout few odd columns": 57,
    "random_slice:_fill uniform": 21,
    "random_slice:_fill bernoulli": 20,
}
"""Instructions per element of 16 bits (of attention: per score), in the machine code. An H100 runs about 34 in the time
in which its memory reads and writes one: up to there, a kernel that does both waits for the memory. They hold for
Triton 3.7, which torch 2.13 asks for on a GPU, and 3.9.
"""
FEW = {"blocks:_move", "cross_entropy_terms:_forward", "cross_entropy_terms:_backward", "random_slice:_fill dropout"}
ELSEWHERE = {"100": {"attention_dropout:_backward_queries": 183, "attention_dropout:_backward_keys": 196}}
"""Where Triton makes more of a kernel; no such device has run them."""
SHARED_BYTES = {"80": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024, "120": 99 * 1024}
"""What a program may have. sm_80 has more, but its successors sm_86 and sm_89 run the same code."""


SPILLED = {"120": 4}
"""Registers that a kernel writes to memory at usual sizes: none but for the backward of attention there."""
MOST_SPILLED = 450
"""Registers that rare variants write to memory: attention with addends, from a position within a counter, and backward
of attention in 32 bits, which an H100 ran in two thirds of the time of blocks without (8.3 and 5.5 ms, 6.8 and 3.3).
"""


def largest(what, lines):
    return max(int(re.search(rf" {what}=(\d+)", line)[1]) for line in lines)


def assert_compiled_well(lines, capability):
    """Products are not fused with sums (random bits would differ), and aligned copies move 16 bytes at a time."""
    assert not [line for line in lines if " fused=0 " not in line]
    assert largest("shared", lines) <= SHARED_BYTES[capability]
    assert any(line.startswith("blocks:_move") and " vector=4 " in line for line in lines)


@pytest.mark.procs
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", ["90", *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)])
def test_kernels_of_training_are_short(capability, few, cache):
    lines = compiled(cache, capability, *(["few"] if few else []))
    assert_compiled_well(lines, capability)
    assert largest("spilled", lines) <= SPILLED.get(capability, 0)
    costs = {}
    for line in lines:
        name, _, rest = line.partition(" fused=")
        costs[name] = float(rest.partition("sass=")[2])
    limits = LIMITS | ELSEWHERE.get(capability, {})
    assert {name: cost for name, cost in costs.items() if cost > limits[name]} == {}
    assert costs.keys() == (FEW if few else LIMITS.keys())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_every_dtype(capability, cache):
    lines = compiled(cache, capability, "all")
    assert_compiled_well(lines, capability)
    assert largest("spilled", lines) <= MOST_SPILLED
