"""The front of OneFlow programs: job functions, views, placements by string, ``nn.Graph``.

    from workbench import flow
    import workbench.flow.typing as tp

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((100, 1, 28, 28))) -> tp.Numpy: ...

Two kinds of programs: *job functions*, driven from one process (a notebook, a script), which run on the engines of the
session; and *eager* programs, which every rank runs as a whole (under ``python -m workbench.flow.launch``, or in a cell
under ``%%global``). Names are loaded when they are first used; an engine never loads the notebook's side.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workbench.lazy import lazy_names

_HOMES = {
    # types of elements
    "torch": [
        "bfloat16", "bool", "double", "float", "float16", "float32", "float64", "half", "int", "int8", "int32",
        "int64", "long", "uint8",
    ],
    # job functions
    "workbench.flow.jobs.function": ["global_function"],
    "workbench.flow.jobs.settings": ["function_config"],
    "workbench.flow.jobs.variables": ["get_all_variables", "get_variable"],
    "workbench.flow.jobs.micro_batches": ["acc", "pack", "repeat", "unpack"],
    "workbench.flow.initializers": [
        "constant_initializer", "glorot_normal_initializer", "glorot_uniform_initializer", "kaiming_initializer",
        "ones_initializer", "random_normal_initializer", "random_uniform_initializer", "truncated_normal",
        "truncated_normal_initializer", "variance_scaling_initializer", "xavier_normal_initializer",
        "xavier_uniform_initializer", "zeros_initializer",
    ],
    "workbench.flow.functions": [
        "cast", "concat", "expand_dims", "flatten", "gather", "identity", "matmul", "parallel_cast", "reshape", "slice",
        "squeeze", "transpose",
    ],
    # eager programs
    "workbench.flow.creation": [
        "arange", "as_tensor", "empty", "eye", "from_numpy", "full", "linspace", "logspace", "manual_seed", "normal",
        "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
    ],
    "workbench.flow.local_tensor": ["to_global", "to_local"],
    "workbench.flow.placements": ["placement"],
    "workbench.flow.saving": ["load", "save"],
    # modules of other names
    "torch.optim": ["optim="],
    "workbench.core.sbp": ["sbp="],
    "workbench.flow.mnist_util": ["data=", "mnist_util="],
}  # fmt: skip
"""Module -> the names of ``flow`` that it holds."""

_MODULES = [
    "config", "distribute", "env", "layers", "losses", "math", "nn", "optimizer", "scope", "train", "typing",
]  # fmt: skip
"""Names of ``flow`` that are modules of this folder."""


def _from_torch(name: str) -> Any:
    """A function or type of torch, unchanged; it takes local and global tensors."""
    return getattr(import_module("torch"), name)


__getattr__, __dir__, __all__ = lazy_names(
    __name__, _HOMES | {f"{__name__}.{name}": [f"{name}="] for name in _MODULES}, otherwise=_from_torch
)
