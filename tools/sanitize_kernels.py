"""Runs the GPU tests of kernels under compute-sanitizer: memcheck (bounds, alignment) and racecheck (shared memory).

    python -m tools.sanitize_kernels                                all of tests/kernels
    python -m tools.sanitize_kernels tests/kernels/test_blocks.py   a part of them

Needs a CUDA device and compute-sanitizer, which is part of the CUDA toolkit; says so and succeeds where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

TOOLS = ("memcheck", "racecheck")
_FOUND_SOMETHING = 86


def main(paths: Sequence[str]) -> int:
    """Run both tools on the tests of these paths; returns the first exit code that is not zero."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or shutil.which("nvidia-smi") is None:
        print("tools.sanitize_kernels needs a CUDA device and compute-sanitizer; here is none.")
        return 0
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout=0", *paths]
        command = [sanitizer, f"--tool={tool}", f"--error-exitcode={_FOUND_SOMETHING}", *tests]
        done = subprocess.run(command, env=environment, check=False).returncode
        if done:
            print(f"{tool} or the tests failed: exit code {done}")
            return done
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["tests/kernels"]))
