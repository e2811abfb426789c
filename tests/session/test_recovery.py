"""After a loss: the source of each variable, cells that cannot run, and losses as if no rank had been lost."""

import copy
import io
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CellError, SessionError
from workbench.session.on_engine.recovery import Recovery, _random_states
from workbench.session.protocol import SavedCheckpoint
from workbench.session.recovery import Losses, Recovered, SetupCells, describe_loss
from workbench.tensors.world import current
from workbench.testing import run_ranks

LOST = 1


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3))


NET = make_net()


def set_up(strategy):
    model = wb.parallelize(copy.deepcopy(NET), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    ranks = wb.placement("cpu", ranks=list(range(wb.world_size())))
    return {
        "model": model,
        "net": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loss_fn": nn.CrossEntropyLoss(),
        "step": 0,
        "losses": [],
        "own_rank": wb.rank(),
        "trainer": SimpleNamespace(model=model, ema=copy.deepcopy(NET), best=10.0, own_rank=wb.rank()),
        "inputs": wb.ones(4, 3, placement=ranks, sbp="S(0)"),
        "average": wb.zeros(3, placement=ranks, sbp="B"),
    }


def train_step(has, targets):
    """One step on the batch of its number; returns the loss."""
    inputs = torch.randn(len(targets), 6, generator=torch.Generator().manual_seed(has["step"]))
    has["optimizer"].zero_grad()
    loss = F.cross_entropy(has["model"](inputs), targets)
    loss.backward()
    has["optimizer"].step()
    return loss.item()


def train(has, num_steps):
    for _ in range(num_steps):
        loss = train_step(has, torch.arange(6) % 3)
        has["scheduler"].step()
        has["losses"].append(loss)
        has["average"] += loss
        with torch.no_grad():
            has["trainer"].ema[0].weight.mul_(0.9)
        has["trainer"].best = min(has["trainer"].best, loss)
        has["step"] += 1
    return has["losses"][-num_steps:]


def recover(kept, fresh, checkpoints=()):
    """As after the loss of rank 1: it has no variables but those of the set-up cells."""
    namespace = {**(kept if wb.rank() != LOST else {}), **fresh}
    states = _random_states(current())
    rows = Recovery(namespace, dict(namespace), kept, [LOST], current(), checkpoints).run(states)
    return namespace, dict(rows)


@pytest.mark.parametrize("each_has_its_seed", [True, False])
def test_random_numbers_continue_where_the_ranks_were(each_has_its_seed):
    """Also if a set-up cell has seeded every rank differently: the lost one begins as this cell seeds it."""

    def draw():
        return torch.rand(1, generator=current().context.generator).item()

    def program(rank):
        seed = 1234 + rank * each_has_its_seed
        wb.manual_seed(seed)
        first, states = draw(), _random_states(current())
        wb.manual_seed(seed)
        Recovery({}, {}, {}, [LOST], current()).run(states)
        return first, draw()

    for rank, (first, then) in enumerate(run_ranks(program, 3)):
        generator = torch.Generator().manual_seed(1234 + rank * each_has_its_seed)
        expected = [torch.rand(1, generator=generator).item() for _ in range(2)]
        assert first == expected[0]
        assert then == expected[0 if rank == LOST and each_has_its_seed else 1]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "givers"),
    [("*: data", 3, "rank 0"), ("0: model; 1: data; 4: model | 1x2x2", 4, "ranks 0,3")],
    ids=["data", "data_and_model"],
)
def test_losses_are_those_of_a_run_that_lost_no_rank(strategy, num_ranks, givers):
    def unbroken():
        has = set_up(strategy)
        return train(has, 5), train(has, 3)

    first, then = run_ranks(unbroken, num_ranks)[0]

    def program():
        kept = set_up(strategy)
        assert train(kept, 5) == first
        namespace, rows = recover(kept, set_up(strategy))
        assert namespace["own_rank"] == wb.rank() and namespace["step"] == 5
        assert torch.equal(namespace["average"].to_local(), kept["average"].to_local())
        old, new = kept["trainer"], namespace["trainer"]
        assert (new.best, new.own_rank, new.model) == (old.best, wb.rank(), namespace["model"]) and new is not old
        assert torch.equal(new.ema[0].weight, old.ema[0].weight) and rows.pop("trainer.ema") == "rank 0"
        assert rows.pop(f"trainer.best = {old.best!r}") == "rank 0" and rows.pop("trainer.model") == rows["model"]
        return train(namespace, 3), rows

    names = ["average", "loss_fn", "losses", "model", "net", "optimizer", "scheduler", "step = 5"]
    for losses, rows in run_ranks(program, num_ranks):
        assert losses == then
        assert rows == dict.fromkeys(names, "rank 0") | dict.fromkeys(["model", "net", "optimizer"], givers)


def scale(x):
    return x * factor  # noqa: F821 - a variable of the cells


def test_each_value_comes_from_where_it_can():
    """By name: the value before the loss, the one of the set-up cells (None: they make none), what the table says."""
    old_class, new_class = (type("Meter", (), {"__module__": "__main__"}) for _ in range(2))

    def program():
        rank = wb.rank()
        ranks = wb.placement("cpu", ranks=[0, 1, 2])
        meter = old_class()
        meter.values = [1, 2]
        kept = {
            "counter": (7, None, "rank 0"),
            "factor": (3, None, "rank 0"),
            "mean": (torch.ones(2), None, "rank 0"),
            "nested": ({"a": [1, torch.ones(2)]}, {"a": [1, torch.zeros(2)]}, "rank 0"),
            "library": (io, None, "rank 0"),
            "scale": (scale, None, "rank 0"),
            "meter": (meter, new_class(), "rank 0"),
            "Meter": (old_class, new_class, None),
            "trainer": ({"step": 3, "of": nn.Linear(1, 1)}, {"step": 0}, "as its set-up cell makes it: it cannot be"),
            "unchanged": ([1, "x"], [1, "x"], None),
            "of_setup": (rank, rank, None),
            "different": (rank, None, "lost: it differs between the other ranks"),
            "result": (
                {"y": wb.ones(6, placement=ranks, sbp="S(0)")},
                None,
                "lost: it cannot be pickled (it holds a glo",
            ),
            "state": (
                [torch.optim.AdamW(nn.Linear(1, 1).parameters())],
                None,
                "lost: it cannot be pickled (it holds an",
            ),
            "handle": ((i for i in ()), None, "lost: it cannot be pickled"),
            "lines": ((i for i in ()), (i for i in ()), "as its set-up cell makes it: it cannot be pickled"),
            "large": (torch.ones(5_000_000), None, "lost: it cannot be pickled (larger than"),
            "Local": (old_class, None, "lost: a class"),
            "forgotten": (nn.ReLU(), None, "lost: no set-up cell makes it"),
            "shards": (wb.ones(6, placement=ranks, sbp="S(0)"), None, "lost: no set-up cell makes it"),
            "changed": (
                wb.ones(6, placement=ranks, sbp="S(0)"),
                wb.zeros(6, placement=ranks, sbp="S(0)"),
                "lost: of changed only 4 of 6 elements are left",
            ),
        }
        fresh = {name: made for name, (_, made, _) in kept.items() if made is not None}
        expected = {name: shown for name, (_, _, shown) in kept.items()}
        old = {name: value for name, (value, _, _) in kept.items()}
        if rank == 2:
            old["only"] = 1
        namespace = {**(old if rank != LOST else {}), **fresh}
        old["scale"] = FunctionType(scale.__code__, namespace)
        rows = Recovery(namespace, dict(namespace), old, [LOST], current()).run(_random_states(current()))
        return {name.partition(" =")[0]: text for name, text in rows}, expected, namespace

    results = run_ranks(program, 3)
    rows, expected, _ = results[0]
    assert all(each == rows for each, _, _ in results)
    assert rows.pop("only") == "lost: only rank 2 had it"
    assert set(rows) == {name for name, shown in expected.items() if shown is not None}
    for name, text in rows.items():
        assert text.startswith(expected[name]), name
    for rank, (_, _, has) in enumerate(results):
        assert has["counter"] == 7 and has["nested"]["a"][1].sum() == 2 and has["of_setup"] == rank
        assert has["scale"](2) == 6 and has["library"] is io and has["meter"].values == [1, 2]
        assert ("different" in has) == (rank != LOST)
    assert type(results[0][2]["meter"]) is new_class


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ("*: data | 1x3x1 zero=1", "0.weight.exp_avg only 32 of 48"),
        ("*: data | 1x3x1 zero=3", "of model.0.weight only 32 of 48 elements"),
        ("0: data@0; [1-3]: data@1; 4: data@2", "1.weight"),
        pytest.param("0: model; [1-3]: model; 4: data", "of model.0.weight only", marks=pytest.mark.slow),
    ],
    ids=["zero1", "zero3", "stages", "model"],
)
def test_what_no_rank_holds_comes_from_the_newest_checkpoint(tmp_path, strategy, lost):
    another_model = nn.Linear(2, 2)

    def program():
        kept = set_up(strategy)
        paths = [tmp_path / name for name in ("first", "second", "of_another_model", "removed")]
        names = {"net": ["model", "net"]}  # the variable has another name than the part
        train(kept, 2)
        wb.checkpoint.save(paths[0], **{part: kept[part] for part in ("model", "optimizer", "step")})
        train(kept, 2)
        wb.checkpoint.save(paths[1], **{part: kept[part] for part in ("net", "optimizer", "scheduler", "step")})
        wb.checkpoint.save(paths[2], other=another_model)
        expected = train(kept, 3)

        _, rows = recover(kept, set_up(strategy))
        assert lost in rows["model"] + rows["optimizer"] and "no checkpoint of this session has it" in rows["optimizer"]
        assert rows["step = 7"] == "rank 0"

        namespace, rows = recover(kept, set_up(strategy), [SavedCheckpoint(str(path), names) for path in paths])
        source, best = f"checkpoint {paths[1]}", f"trainer.best = {kept['trainer'].best!r}"
        assert rows == {
            **dict.fromkeys(["model", "net", "optimizer", "scheduler", "step = 4"], source),
            **dict.fromkeys(["losses", "loss_fn", "average", "trainer.ema", best], "rank 0"),
            "trainer.model": source,
        }
        assert len(namespace["losses"]) == 7  # not in the checkpoint
        assert train(namespace, 3) == expected

    run_ranks(program, 3)


def test_copies_of_a_step_that_broke_off_come_from_one_rank():
    def program():
        kept = set_up("*: data")
        train(kept, 1)
        if wb.rank() == 2:
            kept["model"][0].weight.to_local().detach().add_(1.0)
        namespace, rows = recover(kept, set_up("*: data"))
        return rows["model"], namespace["model"][0].weight.to_local()

    results = run_ranks(program, 3)
    assert all(text == "rank 0; the copies differed, as a step broke off" for text, _ in results)
    assert all(torch.equal(weight, results[0][1]) for _, weight in results)


def test_without_any_rank_left_a_checkpoint_is_the_only_source(tmp_path):
    def program():
        kept = set_up("*: data")
        train(kept, 2)
        wb.checkpoint.save(tmp_path / "c", model=kept["model"], optimizer=kept["optimizer"], step=kept["step"])
        expected, namespace = train(kept, 2), set_up("*: data")
        saved = SavedCheckpoint(str(tmp_path / "c"), {})
        rows = Recovery(namespace, dict(namespace), {}, [0, 1], current(), [saved]).run(None)
        assert dict(rows)["scheduler"] == "lost: no rank has a copy of it; it is as its set-up cell makes it"
        assert dict(rows)["step = 2"] == f"checkpoint {tmp_path / 'c'}"
        assert train(namespace, 1) == expected[:1]

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=3"])
def test_what_new_ranks_have_trained_is_kept(tmp_path, strategy):
    """All were replaced, and the user has run some of the cells again: neither set-up cells nor an older checkpoint
    overwrite that. What no rank holds comes from set-up cells, as the checkpoint would replace the model as well.
    """

    def program():
        kept = set_up(strategy)
        wb.checkpoint.save(tmp_path / "c", **{part: kept[part] for part in ("model", "scheduler", "step")})
        train(kept, 2)
        kept |= {name: nn.Linear(2, 2) for name in ("other", "frozen", "kind")} | {"of_rank": wb.rank()}
        kept |= {"only": 1} if wb.rank() else {}
        del kept["scheduler"], kept["loss_fn"]
        namespace = kept | set_up(strategy) | {"frozen": nn.Linear(3, 2), "kind": kept["optimizer"]}
        states, everyone = _random_states(current()), range(wb.world_size())
        saved = [SavedCheckpoint(str(tmp_path / "c"), {})]
        rows = dict(Recovery(namespace, dict(namespace), kept, everyone, current(), saved).run(states))
        assert {name for name, row in rows.items() if row.startswith("kept")} >= {"model", "losses", "step", "kind"}
        assert "no checkpoint of this session has it without " in rows["scheduler"]
        assert all(namespace[name] is kept[name] for name in ("frozen", "other", "kind"))
        assert namespace["of_rank"] == wb.rank() and namespace["step"] == 2
        losses = []
        for has in (namespace, kept):
            has["scheduler"] = torch.optim.lr_scheduler.StepLR(has["optimizer"], 9)
            wb.manual_seed(1)
            losses.append(train(has, 2))
        assert losses[0] == losses[1]

    run_ranks(program, 2)


def test_what_only_one_rank_has_made_since_all_were_replaced_reaches_the_other():
    """Rank 1 was lost once more. Also names of modules, which a cell has imported."""

    def program():
        kept = {"library": io, "k": 4} if wb.rank() != LOST else {}
        namespace, rows = recover(kept, {"model": nn.Linear(2, 2)})
        assert namespace["library"] is io and namespace["k"] == 4
        assert rows.pop("model").startswith("lost: no rank has a copy of it")
        return rows

    assert run_ranks(program, 2) == [{"library": "rank 0", "k = 4": "rank 0"}] * 2


def test_set_up_cells_keep_their_places_and_fail_with_what_to_do(capsys):
    cells, ran = SetupCells(), []
    cells.record("a", "x = 1", (0, 1))
    cells.record("b", "y = x", (0,))
    cells.record("a", "x = 2", (0, 1))
    assert cells.run_again([], lambda code, ranks, **_: ran.append((code, ranks)), 2) == 2
    assert ran == [("x = 2", (0, 1)), ("y = x", (0,))]

    def fail(code, ranks, **_):
        if code == "y = x":
            raise CellError("NameError on rank 0")

    with pytest.raises(
        SessionError,
        match=r"(?s)set-up cell 2 of 2 failed.*have their variables back.*from %push, push again.*NameError",
    ):
        cells.run_again(["model"], fail, 2)
    cells.record("b", "y = z", (0,), is_setup=False)
    assert "no longer marked as set-up" in capsys.readouterr().err
    assert cells.run_again(["model"], fail, 2) == 1
    cells.record("", "z = 1", None, is_setup=False)
    assert not capsys.readouterr().err, "it was not marked"
    with pytest.raises(SessionError, match=r"only cells can make model, optimizer again.*%%global --setup"):
        SetupCells().run_again(["optimizer", "model"], fail, 2)
    assert SetupCells().run_again([], fail, 2) == 0


def test_set_up_cells_run_on_those_of_their_ranks_that_are_there():
    cells, ran = SetupCells(), []
    cells.record("a", "x", None)
    cells.record("b", "y", (0, 2))
    cells.record("c", "z", (2,))
    assert cells.run_again([], lambda code, ranks, **_: ran.append((code, ranks)), num_ranks=2) == 2
    assert ran == [("x", None), ("y", (0,))]
    only = SetupCells()
    only.record("c", "z", (2,))
    with pytest.raises(SessionError, match="no cell is marked as set-up"):
        only.run_again(["model"], pytest.fail, num_ranks=2)


def test_without_set_up_cells_nothing_is_recovered_once_all_is_lost():
    losses = Losses()
    losses.add([0, 1], 2)
    with pytest.raises(SessionError, match=r"no cell is marked as set-up, and all ranks have lost.*checkpoint\.load"):
        SetupCells().recover(losses, [], lambda *_: [[], []], pytest.fail)
    assert losses.ranks == {0, 1} and losses.lacking(2) == () and losses.lacking(3) == (0, 1)


def test_a_loss_is_described_with_what_can_come_back():
    assert describe_loss([1], "exit code 3", ["x"], False).endswith("lost: x. To bring them back: %workbench recover")
    assert "names" not in describe_loss([1], "", None, False) and "without variables" in describe_loss(
        [1], "", [], False
    )
    text = describe_loss([0, 1], "killed by SIGKILL", None, True)
    assert "ranks 0-1 died (killed by SIGKILL) and are started again; all variables are lost" in text


def test_the_table_has_one_line_per_source():
    rows = [("model", "rank 0"), ("x", "lost: why"), ("optimizer", "rank 0")]
    assert str(Recovered((1,), 2, rows)).splitlines() == [
        "workbench: recovered rank 1; 2 set-up cells ran again",
        "  model, optimizer  rank 0",
        "  x                 lost: why",
    ]
    assert "no rank has lost its variables" in str(Recovered())
