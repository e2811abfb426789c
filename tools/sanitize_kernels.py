"""Runs the GPU tests of kernels under compute-sanitizer: memcheck (bounds, alignment) and racecheck (shared memory).

    python -m tools.sanitize_kernels

Needs a CUDA device and compute-sanitizer, which is part of the CUDA toolkit; says so and succeeds where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck")
_FOUND_SOMETHING = 86


def main() -> int:
    """Run both tools; returns the first exit code that is not zero."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or shutil.which("nvidia-smi") is None:
        print("tools.sanitize_kernels needs a CUDA device and compute-sanitizer; here is none.")
        return 0
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout=0", "tests/kernels"]
        command = [sanitizer, f"--tool={tool}", f"--error-exitcode={_FOUND_SOMETHING}", *tests]
        done = subprocess.run(command, env=environment, check=False).returncode
        if done:
            print(f"{tool} or the tests failed: exit code {done}")
            return done
    return 0


if __name__ == "__main__":
    sys.exit(main())
