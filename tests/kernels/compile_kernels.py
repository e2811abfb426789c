"""Compile every kernel for a GPU, without one, with the arguments of its launcher.

The interpreter runs kernels as Python and numpy; the compiler types them. This finds what only the compiler minds.
Prints one line per compiled variant; started by ``test_compiling`` in a process without the interpreter.
"""

import re
import sys
import warnings

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from workbench.kernels import launch
from workbench.kernels.attention_dropout import attention_dropout
from workbench.kernels.blocks import move_blocks, pack
from workbench.kernels.cross_entropy_terms import cross_entropy_terms
from workbench.kernels.embedding_rows import embedding_rows
from workbench.kernels.random_slice import dropout_slice, fill_random

label = None
"""What the kernels that are measured are compiled for."""
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class AbsentGpu(DriverBase):
    """A driver that only knows the compilation target."""

    def __init__(self, capability):
        self.capability = capability

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise RuntimeError("kernels are compiled here, not timed: there is no GPU")


def compile_only(self, *args, grid, warmup, **kwargs):
    compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
    ptx = compiled.asm["ptx"]
    fused = sum(" fma." in line for line in ptx.splitlines())
    wide = max((k for k in (1, 2, 4) if k == 1 or f".v{k}.b" in ptx), default=1)
    name = f"{self.fn.__module__.rpartition('.')[2].removesuffix('_triton')}:{self.fn.__name__}"
    code = [] if label is None and "attention" not in name else instructions(compiled)
    cost = instructions_per_element(compiled, code, dict(zip(self.arg_names, args, strict=True)))
    spilled = sum(bool(re.match(r"(@!?U?P\d+ )?STL\b", line)) for line in code)
    shared = compiled.metadata.shared
    found = f"fused={fused} vector={wide} shared={shared} spilled={spilled} sass={cost}"
    sys.stdout.write(f"{name}{label or ''} {found}\n")
    return compiled


def instructions(compiled):
    return [line.split("\t")[1] for line in compiled.asm["sass"].splitlines() if "\t" in line]


def instructions_per_element(compiled, code, given):
    """Instructions in the kernel for each element of a lane's part of a block, as if all branches were taken."""
    elements = given.get("rows_per_program", 1) * given.get("columns_per_program", 1)
    elements *= given["rows"] if "value_width" in given else 1
    elements *= given.get("columns", 1) * 4 * given["counters"] if "counters" in given else given.get("columns", 1)
    lanes = 32 * compiled.metadata.num_warps
    return sum(not line.startswith("NOP") for line in code) * lanes / max(elements, lanes)


def blocks(dtype):
    big = torch.zeros(64, 64).to(dtype)
    move_blocks([torch.empty_like(big)], [big], [1], "none")  # side by side, aligned
    x = torch.zeros(6, 7, 3).to(dtype)
    pack([x[:, :3], x[:, 3:, 1:2]])
    for reduction in ("sum", "max", "min"):
        if dtype != torch.bool:
            move_blocks([torch.empty(5, 3, dtype=dtype).t()], [torch.zeros(3, 5).to(dtype)] * 3, [3], reduction)


def losses(dtype):
    for logits in (
        torch.zeros(3, 100, dtype=dtype),
        torch.zeros(7, 3, dtype=dtype).t(),
        torch.zeros(2, 1, dtype=dtype),
    ):
        leaf = logits.detach().requires_grad_()
        for first in (0, 1, 2**33):
            terms = cross_entropy_terms(leaf, torch.zeros(len(leaf), dtype=torch.int64), first)
            sum(term.sum() for term in terms).backward()


def embeddings(dtype):
    for shape, first in (((6, 5), 0), ((1, 1), 1), ((6, 700), 2**33)):
        weight = torch.zeros(shape, dtype=dtype, requires_grad=True)
        embedding_rows(weight, torch.zeros(4, dtype=torch.int64), first, 1).sum().backward()


def randoms(dtype):
    for key, first, strides in ((1, 0, [3, 1]), (2**62, 2**33, [2**33, 1])):
        out = torch.zeros(2, 3).to(dtype)
        for kind in ("uniform", "normal", "bernoulli") if dtype.is_floating_point else ("integers",):
            fill_random(out, kind, key, first, strides, 1.0, 2.0)
        if dtype.is_floating_point:
            dropout_slice(out, key, first, strides, 0.5)
    fill_random(torch.zeros(3, 4, 5, 8).to(dtype), kind, 1, 0, [1920, 320, 40, 1], 0.0, 1.0)
    if dtype == torch.uint8:  # memory that is not written takes no room
        fill_random(torch.empty(2**30, 1, dtype=dtype), kind, 1, 0, [4, 1], 0.0, 1.0)


def attentions(dtype):
    """Causal, with a choice of keys, and with addends on a slice that begins within a counter."""
    choice = torch.ones(2, 1, 1, 160, dtype=torch.bool).expand(2, 2, 70, 160)
    addends = torch.zeros(70, 161, dtype=dtype).expand(2, 2, 70, 161)
    for width in {torch.float64: (), torch.float16: (8, 80)}.get(dtype, (64, 128)):
        for num_keys, mask, causal_from, first in (
            (160, None, 0, 0),
            (160, choice, None, 2**40),
            (161, addends, None, 1),
        ):
            query, key = (torch.zeros(2, n, 2, width, dtype=dtype).transpose(1, 2) for n in (70, num_keys))
            strides = [140 * num_keys, 70 * num_keys, num_keys, 1]
            leaf = query.requires_grad_()
            attention_dropout(leaf, key, key, mask, 0.1, causal_from, 0.1, 7, first, strides)[0].sum().backward()


def of_training(few=False):
    """What a step of training in 16 bits launches, at usual sizes; or only copies, losses and one dropout."""
    global label
    label = ""
    big = torch.zeros(64, 4096, dtype=torch.bfloat16)
    move_blocks([torch.empty_like(big)], [big], [1], "none")
    logits = torch.zeros(2, 32000, dtype=big.dtype, requires_grad=True)
    cross_entropy_terms(logits, torch.zeros(2, dtype=torch.int64), 0)[0].sum().backward()
    label = " dropout"
    dropout_slice(big, 1, 0, [4096, 1], 0.5)
    if few:
        return
    label = ""
    x = torch.zeros(1, 1, 1024, 128, dtype=big.dtype, requires_grad=True)
    attention_dropout(x, x, x, None, 0.1, 0, 0.1, 7, 0, [2**20, 2**20, 1024, 1])[0].sum().backward()
    weight = torch.zeros(4, 4096, dtype=big.dtype, requires_grad=True)
    embedding_rows(weight, torch.zeros(4, dtype=torch.int64), 1).sum().backward()
    for name, width, first in (
        (" dropout columns", 2048, 2048),
        (" dropout odd columns", 2047, 1),
        (" dropout few odd columns", 1023, 1),
    ):
        label = name
        dropout_slice(big[:, :width].contiguous(), 1, first, [4096, 1], 0.5)
    for kind in ("uniform", "bernoulli"):
        label = f" {kind}"
        fill_random(big, kind, 1, 0, [4096, 1], 0.0, 1.0)
    label = " sum of 2"
    move_blocks([torch.empty_like(big)], [big, big], [2], "sum")


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "AnnAssign", DeprecationWarning)  # of Triton, since Python 3.13
    launch.runs_on = lambda device: True
    triton.runtime.driver.set_active(AbsentGpu(int(sys.argv[1])))
    run, JITFunction.run = JITFunction.run, compile_only
    if sys.argv[2:] == ["all"]:
        for dtype in FLOATS:
            for kernels in (blocks, losses, embeddings, randoms, attentions):
                kernels(dtype)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool):
            blocks(dtype)
            randoms(dtype)
    else:
        of_training(few=sys.argv[2:] == ["few"])
