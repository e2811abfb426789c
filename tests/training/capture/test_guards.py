"""What changes a captured step without changing its inputs is recorded anew."""

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import assert_same, called, filled, step_of
from workbench.tensors.world import current
from workbench.testing import run_ranks


def changes_of(module, optimizer):
    """What changes a step without changing its inputs, by name."""
    return {
        "strategy": lambda: wb.parallelize(module, "*: data | 1x2x1 zero=1", optimizer=optimizer),
        "mode": module.eval,
        "frozen": lambda: module[0].requires_grad_(False),
        "group": lambda: optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.5}),
    }


@pytest.mark.parametrize("name", ["strategy", "mode", "frozen", "group"])
def test_what_changes_the_step_is_recorded_anew(name):
    def program(capture):
        module = wb.parallelize(
            nn.Sequential(filled(nn.Linear(4, 8)), nn.Dropout(0.5), filled(nn.Linear(8, 3))), "*: data | 1x2x1"
        )
        optimizer = torch.optim.AdamW(module[0].parameters(), lr=0.1)
        step = step_of(module, optimizer)
        step = wb.capture(step) if capture else step
        losses = [called(step, 1).full_tensor() for _ in range(4)]
        changes_of(module, optimizer)[name]()
        losses += [called(step, 1).full_tensor() for _ in range(4)]
        assert not capture or (step.num_recordings, step.num_replays) == (2, 4)
        return [*losses, *(parameter.full_tensor().detach() for parameter in module.parameters())]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_after_a_rebuild_all_ranks_record_anew_because_not_all_may_have_a_recording(num_calls):
    """Rank 1 was interrupted in the call that recorded on rank 0, or its process is new."""

    def program(breaks_off):
        module = wb.parallelize(filled(nn.Linear(4, 3)), "*: data | 1x2x1")
        step = step_of(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        captured = wb.capture(step, max_recordings=1)
        losses = [called(captured, 1).full_tensor() for _ in range(num_calls)]
        if breaks_off:
            world = current()
            captured = wb.capture(step, max_recordings=1) if world.rank == 1 else captured
            world.rejoin(world.world_size, world.transport)
        losses += [called(captured, 1).full_tensor() for _ in range(4)]
        assert captured.num_replays >= 2
        return losses

    assert_same(*(run_ranks(lambda breaks_off=breaks_off: program(breaks_off)) for breaks_off in (True, False)))
