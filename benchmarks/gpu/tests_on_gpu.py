"""The tests that need a GPU, alone and under NVIDIA's compute-sanitizer, and what they ran with."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.gpu.place import Finding, Found, Place, run_command
from workbench.units import format_bytes

COMPILED = {"TRITON_INTERPRET": "0"}
OTHERS = "tests", "--ignore=tests/kernels", r"--files-that-say=mark\.gpu"
"""Files without such a test stay out: some register a device of their own, which torch takes for the accelerator."""
SANITIZED = "tests/kernels/test_blocks.py"
"""A part of the tests of kernels: the sanitizer takes a hundred times as long."""


def versions(place: Place) -> Iterator[Found]:
    """Versions, and the GPU."""
    yield Finding("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    triton = importlib.util.find_spec("triton")
    yield Finding("Triton", __import__("triton").__version__ if triton is not None else "not installed")
    if not place.is_gpu:
        return
    found = torch.cuda.get_device_properties(place.device)
    memory = f"{format_bytes(found.total_memory)}, {found.multi_processor_count} multiprocessors"
    yield Finding("GPU", f"{found.name}, {memory}, sm_{found.major}{found.minor}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("CUDA, cuDNN, NCCL", f"{torch.version.cuda}, {torch.backends.cudnn.version()}, {nccl}")
    if shutil.which("nvidia-smi") is not None:
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(driver, capture_output=True, text=True, check=False).stdout
        yield Finding("driver", said.partition("\n")[0])


def kernel_tests(place: Place) -> Iterator[Found]:
    """The kernels, compiled."""
    yield from _tests("tests/kernels")  # most of the time is the compiler's


def other_tests(place: Place) -> Iterator[Found]:
    """Exchanges between processes, training under every strategy, CUDA graphs."""
    yield from _tests(*OTHERS)


def _tests(path: str, *options: str) -> Iterator[Found]:
    without = ["-p", "no:benchmark"]  # a plugin that warns of workers
    return run_command(path, ["-m", "pytest", "-q", "-m", "gpu", "-n", "8", *without, path, *options], COMPILED)


def sanitizer(place: Place) -> Iterator[Found]:
    """Memcheck and racecheck of some of the kernels."""
    if shutil.which("compute-sanitizer") is None:
        yield Finding("compute-sanitizer", "not installed")
        return
    yield from run_command("memcheck, racecheck", ["-m", "tools.sanitize_kernels", SANITIZED])
