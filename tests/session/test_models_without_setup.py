"""Models and optimizers that no set-up cell makes: a recovery is refused, as it would give them up."""

import pytest
import torch
from torch import nn

from tests.session.test_recovery import recover
from workbench.errors import SessionError
from workbench.testing import run_ranks


def test_models_that_no_set_up_cell_makes_are_kept():
    """Parts of others, which loops leave behind, and modules without tensors hold up nothing."""

    def program(*made):
        net, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
        kept = {"net": net, "alias": net, "layer": net[0], "loss": nn.MSELoss(), "nets": [other], "one": other}
        kept |= {"optimizer": torch.optim.SGD(net.parameters())}
        recover(kept, {"x": 1} | {name: renewals[name]() for name in made})

    def refused():
        with pytest.raises(SessionError, match="no set-up cell makes alias, net, optimizer, and a rank that was"):
            program()
        with pytest.raises(SessionError, match="no set-up cell makes optimizer, and a rank that was"):
            program("net", "nets")
        program("net", "nets", "optimizer")

    renewals = {
        "net": lambda: nn.Sequential(nn.Linear(2, 2)),
        "nets": lambda: [nn.Linear(2, 2)],
        "optimizer": lambda: None,
    }
    run_ranks(refused, 3)
