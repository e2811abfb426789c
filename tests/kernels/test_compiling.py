"""Every kernel compiles for a GPU with the arguments of its launcher; this needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.kernels.launch import has_triton

ROOT = Path(__file__).parents[2]


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


def assert_compiled_well(lines):
    """Products are not fused with sums (random bits would differ), and aligned copies move 16 bytes at a time."""
    assert {line.split()[0] for line in lines} >= {"_move", "_forward", "_backward", "_dropout"}
    assert not [line for line in lines if "fused=0" not in line]
    assert any(line.startswith("_move") and line.endswith("vector=4") for line in lines)


@pytest.mark.procs
def test_kernels_compile_for_a_gpu(tmp_path):
    assert_compiled_well(compiled(tmp_path, "90"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_every_dtype(capability, tmp_path):
    assert_compiled_well(compiled(tmp_path, capability, "all"))
