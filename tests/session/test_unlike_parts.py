"""Set-up cells make other modules, optimizers or tensors than the ranks hold, such as those of a cell edited since."""

import pytest
import torch
from torch import nn

import workbench as wb
from tests.session.test_recovery import recover
from workbench.errors import SessionError
from workbench.session.on_engine.recovery import Recovery, _random_states
from workbench.tensors.world import current
from workbench.testing import run_ranks


def trained_by(optimizer, schedule=torch.optim.lr_scheduler.ConstantLR):
    """Makes a model under two names, its optimizer and its schedule."""

    def make():
        model = nn.Linear(2, 2)
        made = optimizer(model.parameters(), lr=0.1)
        return {"model": model, "net": model, "optimizer": made, "schedule": schedule(made)}

    return make


def model(*sizes, **options):
    return lambda: {"model": nn.Linear(*sizes, **options)}


def table(rows, dtype=torch.float32):
    def make():
        return {"table": wb.ones(rows, 2, placement=wb.placement.all("cpu"), sbp="B", dtype=dtype) * (wb.rank() + 1)}

    return make


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("held", "made", "said"),
    [
        (model(2, 2), model(3, 2), r"model: .* weight is \(2, 2\) in the copies that are left, \(2, 3\) in the model"),
        (model(2, 2), model(2, 2, bias=False), "model: 1 unexpected: bias"),
        (model(2, 2, bias=False), model(2, 2), "model: 1 missing in the copies that are left: bias"),
        (model(2, 2, dtype=torch.bfloat16), model(2, 2), "model: torch.bfloat16 in the copies .*, torch.float32 in"),
        (trained_by(ADAMW), trained_by(SGD), "optimizer: AdamW in the copies that are left, SGD in the optimizer"),
        (
            trained_by(SGD),
            trained_by(SGD, torch.optim.lr_scheduler.LinearLR),
            "schedule: ConstantLR in the copies that are left, LinearLR in",
        ),
        (table(4), table(5), r"table: 1 of another shape: table is \(4, 2\) in the copies that are left, \(5, 2\) in"),
        (table(5), table(4), r"table: 1 of another shape: table is \(5, 2\) in the copies that are left, \(4, 2\) in"),
        (table(4, torch.float64), table(4), "table: torch.float64 in the copies that are left, torch.float32 in"),
    ],
)
def test_a_recovery_that_would_change_what_ranks_hold_is_refused(held, made, said):
    def program():
        with pytest.raises(SessionError, match=rf"other parts than the ranks hold\. {said}.*all is kept"):
            recover(held(), made())

    run_ranks(program, 3)


def test_what_new_ranks_hold_is_kept_with_all_that_their_optimizer_refers_to():
    def program():
        kept, made = trained_by(ADAMW)(), trained_by(SGD)()
        namespace = {**kept, **made}
        states, everyone = _random_states(current()), range(wb.world_size())
        Recovery(namespace, dict(namespace), kept, everyone, current()).run(states)
        assert all(namespace[name] is kept[name] for name in kept)

    run_ranks(program, 2)


def test_moments_come_back_where_set_up_cells_make_a_module_that_was_deleted_since():
    def program():
        kept, made = ({"model": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)} for _ in range(2))
        for has in (kept, made):
            has["optimizer"] = ADAMW(has["model"].parameters(), lr=0.1)
        kept["model"](torch.ones(1, 2)).sum().backward()
        kept["optimizer"].step()
        del kept["teacher"]
        namespace, rows = recover(kept, made)
        assert rows["optimizer"].startswith("rank 0")
        for parameter in namespace["model"].parameters():
            moments = namespace["optimizer"].state[parameter]["exp_avg"]
            torch.testing.assert_close(moments, torch.full_like(moments, 0.1))

    run_ranks(program, 3)
