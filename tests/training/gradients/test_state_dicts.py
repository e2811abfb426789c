"""``optimizer.state_dict()`` where each rank holds a part of the state."""

import copy

import pytest
import torch

import workbench as wb
from tests.training.gradients.test_optimizers import step, weights_of
from tests.training.models import make
from workbench.errors import LayoutError
from workbench.testing import run_ranks


@pytest.mark.parametrize("strategy", ["*: model", "*: data | 1x2x1 zero=1", "*: data | zero=3", "pipeline"])
@pytest.mark.filterwarnings("ignore:torch.save or pickle of a global tensor")
def test_parts_of_state_know_whose_they_are(strategy, tmp_path):
    """A file of rank 0 gave every rank the moments of rank 0."""
    models = [make("mlp").double() for _ in range(4)]
    optimizer = torch.optim.Adam(models[3].parameters(), lr=0.02)
    step(models[3], optimizer)
    whole = [state["exp_avg"].clone() for state in optimizer.state.values()]
    for _ in range(2):
        step(models[3], optimizer)

    def body(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        step(model, optimizer)
        found = optimizer.state_dict()
        for number, state in found["state"].items():
            mean = state["exp_avg"]
            assert torch.is_tensor(state["step"]) and not isinstance(state["step"], wb.GlobalTensor)
            if isinstance(mean, wb.GlobalTensor):  # under a pipeline, other ranks have no such entry
                assert mean.tolist() == mean.full_tensor().tolist()
                mean = mean.full_tensor()
            torch.testing.assert_close(mean, whole[number], rtol=1e-9, atol=1e-9)
        assert all(type(state["exp_avg"]) is torch.Tensor for state in optimizer.state.values())
        if rank == 0:
            torch.save(found, tmp_path / "state.pt")
        wb.barrier()
        if rank == 1:
            with pytest.raises(LayoutError, match="rank 0 of 2 saved it, this is rank 1"):
                torch.load(tmp_path / "state.pt", weights_only=False)
        kept, weights = copy.deepcopy(found), copy.deepcopy(model.state_dict())
        step(model, optimizer)
        optimizer.load_state_dict(kept)
        model.load_state_dict(weights)
        for _ in range(2):
            step(model, optimizer)
        return weights_of(model)

    torch.testing.assert_close(run_ranks(body, 2)[1], weights_of(models[3]), rtol=1e-9, atol=1e-9)
