"""A panel that was made before a module of the user's was edited: it trains the new code, or says that it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.session.simulated_session import SimulatedSession
from tests.session.test_user_modules import folder, load, reloader, write
from workbench.errors import SessionError
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject

__all__ = ["folder", "reloader"]  # fixtures
MODELS = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(4, {hidden}), nn.Linear({hidden}, 2))
def loss(output, target): return ((output - target) ** 2).mean() * {weight}
class Loss(nn.Module):
    def forward(self, output, target): return loss(output, target)
"""


def open_comparison(models: Any, loss: Any) -> Comparison:
    data = torch.randn(32, 4), torch.randn(32, 2)
    session: Any = SimulatedSession()
    return Comparison(session, Subject.of(models.Net, data, loss, batch_size=16, steps=3))


@pytest.mark.parametrize(("edit", "old"), [({"hidden": 16}, "model_fn"), ({"weight": 2}, "loss_fn"), ({}, "")])
def test_a_panel_with_old_code_of_a_module_that_was_loaded_again_says_so(folder: Path, edit: dict[str, int], old: str):
    text = {"hidden": 8, "weight": 1}
    write(folder, edited_models=MODELS.format(**text))
    models = load("edited_models")
    with open_comparison(models, models.loss) as functions, open_comparison(models, models.Loss()) as objects:
        write(folder, edited_models=MODELS.format(**(text | edit)) + "def more(): pass")
        load("edited_models")
        for _ in range(2):
            if old:
                with pytest.raises(
                    SessionError, match=rf"edited_models.py has changed since .* {old} .*makes it again"
                ):
                    functions.prepare()
            else:
                functions.prepare()
        if old == "loss_fn":
            objects.prepare()  # its method is as it was


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_autoreload_has_changed_in_its_place_goes_on(folder: Path, reloader: Any, is_whole: bool):
    if is_whole:  # as older versions of IPython always do: the module has new objects, and old ones get the new code
        reloader.deduper_reloader = SimpleNamespace(maybe_reload_module=lambda module: False, update_sources=int)
    write(folder, edited_models=MODELS.format(hidden=8, weight=1))
    models = load("edited_models")
    reloader.check(check_all=True)
    net, time_s = models.Net, Path(models.__file__).stat().st_mtime
    with open_comparison(models, models.loss) as comparison:
        write(folder, edited_models=MODELS.format(hidden=4096, weight=2))
        os.utime(models.__file__, (time_s + 1, time_s + 1))
        reloader.check(check_all=True)
        assert (models.Net is not net) >= is_whole
        comparison.prepare()
        assert comparison.job.model()[0].out_features == 4096  # type: ignore[index]
