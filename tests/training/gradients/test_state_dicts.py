"""``optimizer.state_dict()`` where each rank holds a part of the state."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

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


@pytest.mark.parametrize("strategy", ["*: model", "*: data | zero=3", "pipeline", "*: model | 1x2x2"])
def test_a_full_state_dict_of_torch_is_whole(strategy):
    num_ranks = 4 if "1x2x2" in strategy else 2
    *models, plain = (make("mlp").double() for _ in range(num_ranks + 1))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02)
    step(plain, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    expected = copy.deepcopy(get_state_dict(plain, optimizer, options=options))
    step(plain, optimizer)

    def body(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        step(model, optimizer)
        if strategy == "pipeline":
            with pytest.raises(LayoutError, match=rf"ranks \[{rank}\] of 2 have the state.*wb\.checkpoint\.save"):
                get_state_dict(model, optimizer, options=options)
            return None
        weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        values = [*weights.values(), *(value for each in state["state"].values() for value in each.values())]
        assert all(type(value) is torch.Tensor for value in values)
        torch.testing.assert_close((weights, state["state"]), (expected[0], expected[1]["state"]), rtol=1e-9, atol=1e-9)
        step(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
        step(model, optimizer)
        return weights_of(model)

    found = run_ranks(body, num_ranks)[1]
    if strategy != "pipeline":
        torch.testing.assert_close(found, weights_of(plain), rtol=1e-9, atol=1e-9)
