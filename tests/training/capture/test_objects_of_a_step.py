"""A captured step is recorded anew when a number changes that it reads from an object that it gets or names."""

from functools import partial

import pytest
import torch

import workbench as wb
from tests.training.capture.captured_runs import Trainer
from workbench.testing import run_ranks

TRAINER = Trainer(1)
STEPS = {
    "method": TRAINER.step,
    "decorated method": TRAINER.decorated,
    "object": TRAINER,
    "partial": partial(Trainer.step, TRAINER),
    "variable of the module": lambda x: x * TRAINER.factor(x),
    "variable around it": (lambda trainer: lambda x: x * trainer.factor(x))(TRAINER),
    "argument": Trainer.step,
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_objects_that_the_step_gets_or_names(name, monkeypatch):
    def program():
        captured, x = wb.capture(STEPS[name]), torch.arange(12.0).reshape(3, 4)
        given = (TRAINER, x) if name == "argument" else (x,)
        for of, attribute, value in ((TRAINER.cfg, "t", 2), (TRAINER, "scale", 3)):
            for _ in range(3):
                captured(*given)
            monkeypatch.setattr(of, attribute, value)
            assert torch.equal(captured(*given), TRAINER.step(x))
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 1)
