"""Random numbers of Python, numpy and a GPU go on from a checkpoint, on each rank from its own."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from workbench.testing import run_ranks


def seed(number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()  # noqa: NPY002


def save(path, is_own):
    seed(wb.rank() if is_own else 7)
    draw()
    wb.checkpoint.save(path, step=3)
    return draw()


def load(path, **options):
    seed(100 + wb.rank())
    kept = draw()
    seed(100 + wb.rank())
    wb.checkpoint.load(path, step=0, **options)
    return draw(), kept


def test_numbers_of_python_and_numpy_go_on(tmp_path):
    wanted = run_ranks(lambda: save(tmp_path, False), 1)[0]
    assert run_ranks(lambda: load(tmp_path), 1)[0][0] == wanted
    drawn, kept = run_ranks(lambda: load(tmp_path, random_state=False), 1)[0]
    assert drawn == kept != wanted


def load_both(own, alike):
    return load(own), load(alike)[0]


@pytest.mark.procs
def test_each_rank_goes_on_from_its_own_numbers(tmp_path):
    """A rank that was not there keeps its own, unless all others had the same."""
    wanted = run_ranks(lambda: save(tmp_path / "alike", False), 1)[0]
    saved = run_processes(save, 2, tmp_path / "own", True)
    assert saved[0] != saved[1]
    own, alike = zip(*run_processes(load_both, 3, tmp_path / "own", tmp_path / "alike"), strict=True)
    assert [drawn for drawn, _ in own] == [*saved, own[2][1]]
    assert alike == (wanted,) * 3


def test_a_checkpoint_without_them_is_loaded(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("workbench.training.saving.parts._RANKS", "unknown")
        run_ranks(lambda: save(tmp_path, False), 1)
    drawn, kept = run_ranks(lambda: load(tmp_path), 1)[0]
    assert drawn == kept


def test_numbers_of_a_gpu_go_on(tmp_path, monkeypatch):
    """A generator stands for that of the device; the checkpoint then comes to one without."""
    own = torch.Generator()
    module = SimpleNamespace(
        get_rng_state=lambda _: own.get_state(), set_rng_state=lambda state, _: own.set_state(state)
    )

    def program():
        wb.checkpoint.save(tmp_path / "of gpu", step=3)
        wanted = torch.rand(3, generator=own)
        wb.checkpoint.load(tmp_path / "of gpu", step=0)
        assert torch.equal(torch.rand(3, generator=own), wanted)

    with monkeypatch.context() as patched:
        patched.setattr("workbench.tensors.default_generator._WITHOUT_GENERATOR", ("meta",))
        patched.setattr(torch, "get_device_module", lambda _: module)
        run_ranks(program, 1)
    run_ranks(lambda: wb.checkpoint.load(tmp_path / "of gpu", step=0), 1)
