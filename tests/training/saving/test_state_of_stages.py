"""The state of an optimizer in checkpoints of a pipeline: of each parameter, what the ranks of its stage have."""

import copy

import pytest
import torch

import workbench as wb
from tests.training.strategies.scaled import ON_TWO_STAGES, Scaled, train_scaled
from workbench.testing import run_ranks


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("saved", "loaded"), [(ON_TWO_STAGES, "data"), (ON_TWO_STAGES, ON_TWO_STAGES), ("data", ON_TWO_STAGES)]
)
def test_state_that_optimizers_have_from_the_beginning_is_that_of_the_stage_that_uses_it(saved, loaded, tmp_path):
    torch.manual_seed(0)
    one = Scaled().double()

    def trained(model, num_steps, before=None, after=None):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.3)
        if before is not None:
            wb.checkpoint.load(before, model=model, optimizer=optimizer)
        losses = train_scaled(model, optimizer, num_steps)
        if after is not None:
            wb.checkpoint.save(after, model=model, optimizer=optimizer)
        return losses

    def on_ranks(strategy, num_ranks, *rest):
        models = [copy.deepcopy(one) for _ in range(num_ranks)]
        return run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy), *rest), num_ranks)

    [expected] = on_ranks("data", 1, 6)
    file = tmp_path / "newest"
    for first, second in zip(on_ranks(saved, 2, 3, None, file), on_ranks(loaded, 2, 3, file), strict=True):
        assert first + second == pytest.approx(expected, rel=1e-12)
