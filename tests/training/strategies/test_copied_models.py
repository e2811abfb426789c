"""A deep copy of a parallelized model has the options of its strategy, and with its optimizer it goes on alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.gradients.optim import state_layout
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.offload.host_memory import is_offloaded
from workbench.training.recompute import Recomputed

INPUTS, TARGETS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 4)


def built():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(6, 4))


def step(model, optimizer, backward):
    optimizer.zero_grad()
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    optimizer.step()
    return norm


def on_one_device(model):
    F.mse_loss(model(INPUTS), TARGETS).backward()


def in_stages(model):
    wb.forward_backward(model, F.mse_loss, INPUTS, TARGETS)


def trained(model, backward):
    """Steps of a model, of its copy with a copied optimizer, and of the model again."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = step(model, optimizer, backward)
    copied = copy.deepcopy((model, optimizer))
    return [first, *(step(*copied, backward) for _ in range(2)), step(model, optimizer, backward)], copied


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: data | zero=1 recompute", 2),
        ("*: data | 1x2x1 zero=2 offload=optimizer", 2),
        ("0: data; 1: data; 2: data@1; 3: data@1 | 2x2x1 mb=2 zero=2 recompute", 4),
        pytest.param("*: data | zero=3 recompute=cheap", 2, marks=SLOW),
        pytest.param("*: data | recompute offload=optimizer+activations", 2, marks=SLOW),
        pytest.param("0: data; 1: data; 2: data@1; 3: data@1 | 2x2x1 zero=1 bf16", 4, marks=SLOW),
    ],
)
def test_a_copied_model_and_optimizer_train_under_the_same_options(strategy, num_ranks):
    expected, _ = trained(built(), on_one_device)
    models = [built() for _ in range(num_ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        norms, (copied, optimizer) = trained(model, in_stages)
        for mine, its in zip(model.modules(), copied.modules(), strict=True):
            assert type(mine._compiled_call_impl) is type(its._compiled_call_impl)
            assert not isinstance(its._compiled_call_impl, Recomputed) or its._compiled_call_impl.block is its
        reducers = {GradientReducer.of(p) for p in copied.parameters()} - {None}
        assert len(reducers) <= 1 and not reducers & {GradientReducer.of(p) for p in model.parameters()}
        for mine, its in zip(model.parameters(), copied.parameters(), strict=True):
            assert state_layout(mine) == state_layout(its) and mine.grad.sbp == its.grad.sbp
            assert (GradientReducer.of(mine) is None) == (GradientReducer.of(its) is None)
        offloaded = [is_offloaded(values["exp_avg"]) for values in optimizer.state.values()]
        assert offloaded == ["offload=optimizer" in strategy] * len(offloaded)
        wb.parallelize(copied, "*: data | recompute", optimizer=optimizer)
        return [*norms, step(copied, optimizer, in_stages)]

    for norms in run_ranks(program, num_ranks):
        assert norms[:-1] == pytest.approx(expected, rel=0.05 if "bf16" in strategy else 1e-5)
        assert norms[-1] > 0
