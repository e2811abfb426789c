"""Engines are given back or added: the ranks that stay take over what lay elsewhere, and new ranks get all of it."""

import copy
from collections import OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import workbench as wb
from tests.session.played_engines import PlayedEngines
from tests.session.test_recovery import train_step
from workbench.errors import CollectiveAborted, EngineStartError, PlacementError, SessionError
from workbench.session.engine_pool import EnginePool
from workbench.session.on_engine.recovery import Recovery, _random_states
from workbench.session.on_engine.resizing import withdraw_from
from workbench.session.recovery import Losses, Recovered, Resized
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World, current
from workbench.testing import run_ranks
from workbench.transport.threads import ThreadHub, ThreadTransport

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def set_up(strategy):
    model = wb.parallelize(copy.deepcopy(NET), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ranks = wb.placement.all("cpu")
    table = wb.to_global(torch.arange(14.0).reshape(7, 2), placement=ranks, sbp="B").to_global(sbp="S(0)")
    return {
        "model": model,
        "net": model,
        "optimizer": optimizer,
        "trainer": SimpleNamespace(model=model, encoder=model[0], table=table),
        "tables": [table, {"sum": wb.ones(3, placement=ranks, sbp="P")}],
        "own": wb.zeros(2, placement=wb.placement("cpu", ranks=[0]), sbp="B"),
        "step": 0,
    }


def train(has, num_steps):
    losses = []
    for _ in range(num_steps):
        losses.append(train_step(has, torch.arange(8) % 4))
        has["step"] += 1
    return losses


def unbroken(num_steps):
    return run_ranks(lambda: train(set_up("*: data"), num_steps), 1)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "then"),
    [
        ("*: data", 2, "under *: data"),
        ("*: data | zero=1", 1, "under *: data | zero=1"),
        ("*: data | 1x4x1 zero=3", 2, "under *: data | 1x2x1 zero=3 in place of *: data | 1x4x1 zero=3"),
        ("0: model; 3: model; 5: data | 1x2x2", 2, "under 0: model; 3: model; 5: data | 1x1x2 in place of"),
        ("[0-1]: data@0; 3: data@1; 5: data@1 | 2x2x1", 3, "under *: data in place of"),
    ],
    ids=["data", "zero1", "zero3", "model", "stages"],
)
def test_training_goes_on_with_fewer_ranks(strategy, num_ranks, then):
    expected = unbroken(6)

    def program():
        has = set_up(strategy)
        before = train(has, 3)
        rows = dict(withdraw_from(has, num_ranks, current()))
        assert rows.pop("model").startswith(then)
        assert set(rows) == {"tables", "trainer.table"} - ({"trainer.table"} if "tables" in rows else {"tables"})
        table, total = has["tables"][0], has["tables"][1]["sum"]
        assert torch.equal(table.full_tensor(), torch.arange(14.0).reshape(7, 2))
        assert table.sbp == (wb.sbp.split(0),) and torch.equal(total.full_tensor(), torch.ones(3))
        held = [*has["model"].parameters(), *has["model"].buffers(), table, total, has["own"]]
        assert max(max(each.placement) for each in held) < num_ranks
        return before + train(has, 3)

    for losses in run_ranks(program, 4):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


class Average:
    """Of weights, as programs keep it."""

    def __init__(self, model):
        self.shadow = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
        self.model = [self, model]


@pytest.mark.parametrize("strategy", ["*: data", "0: model; 3: model; 5: data | 1x2x2"])
def test_what_objects_and_lists_hold_moves_too(strategy):
    net, inputs = copy.deepcopy(NET).eval(), torch.ones(8, 6)
    expected = net(inputs)

    def program():
        model, other = (wb.parallelize(copy.deepcopy(net), strategy) for _ in range(2))
        average = Average(model)
        model[0].newest = [wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")]
        of_stage = wb.ones(4, placement=wb.placement("cpu", ranks=[3]), sbp="B")
        if wb.rank() == 3:
            model[1].newest = of_stage
        has = {"a": SimpleNamespace(average=average), "model": model, "models": OrderedDict(other=other)}
        has |= {"newest": deque([wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")]), "model_size": {1: 2}}
        rows = dict(withdraw_from(has, 2, current()))
        assert sorted(rows) == ["a", "model", "model.0.newest", "model.1.newest", "models", "newest"]
        assert rows["model"] == rows["models"] and rows["model"].startswith("under") and "under" not in rows["a"]
        assert rows["model.1.newest"] == "not moved: it differs between ranks"
        for name, parameter in model.named_parameters():
            held = average.shadow[name]
            assert torch.equal(held.full_tensor(), parameter.full_tensor() * 2) and max(held.placement) < 2
        assert max(max(newest[0].placement) for newest in (has["newest"], model[0].newest)) < 2
        return [each(inputs).full_tensor() for each in (model, other)]

    for found in run_ranks(program, 4):
        torch.testing.assert_close(found, [expected] * 2)


def test_what_differs_between_ranks_stays_and_is_said():
    def program():
        ranks = wb.placement.all("cpu")
        has = {"x": wb.ones(4, placement=ranks, sbp="S(0)"), "number": wb.rank()}
        has["y"] = wb.ones(4 if wb.rank() else 5, placement=wb.placement("cpu", ranks=[3]), sbp="B")
        if wb.rank() == 0:
            has["z"] = has["x"]
        return withdraw_from(has, 2, current())

    rows = run_ranks(program, 4)
    assert all(dict(each) == dict(rows[0]) for each in rows)
    where, *others = (dict(rows[0])[name] for name in ("x", "y", "z"))
    assert "S(0)" in where and "[0, 1]" in where and others == ["not moved: it differs between ranks"] * 2


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(
    ("strategy", "givers"),
    [("*: data", "rank 0"), ("*: data | zero=3", "ranks 0-1"), ("0: model; 3: model; 5: data", "ranks 0-1")],
)
def test_training_goes_on_with_more_ranks(strategy, givers):
    """Ranks 0 and 1 train; then 2 and 3 come, and get model and optimizer by the set-up."""
    expected, small = unbroken(6), ThreadHub(2)

    def program(rank):
        world, kept, before = current(), {}, []
        if rank < 2:
            first = World(rank, 2, torch.device("cpu"), ThreadTransport(small, rank, torch.device("cpu")))
            first.context.generator = torch.Generator().manual_seed(0)
            with Simulated(first):
                kept = set_up(strategy)
                before = train(kept, 3)
            first.rejoin(4, world.transport)
            world = first
        with Simulated(world):
            has = {**kept, **set_up(strategy)}
            rows = dict(Recovery(has, dict(has), kept, [2, 3], world).run(_random_states(world)))
            assert rows["model"] == rows["optimizer"] == givers
            assert has["step"] == 3 and rows["step = 3"] == "rank 0"
            return before, train(has, 3)

    for rank, (before, after) in enumerate(run_ranks(program, 4)):
        torch.testing.assert_close(before, expected[:3] if rank < 2 else [], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after, expected[3:], rtol=1e-4, atol=1e-5)


def test_a_tensor_on_ranks_that_are_gone_says_so():
    def program():
        world, ranks = current(), wb.placement.all("cpu")
        split = wb.arange(8, placement=ranks, sbp="S(0)")
        whole = wb.arange(2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        if world.rank == 2:
            return
        world.rejoin(2, world.transport)
        with pytest.raises(PlacementError, match="rank 2 does not exist; this world has 2 ranks"):
            wb.ones(2, placement=ranks, sbp="B")
        assert split.to_local().tolist() == [[0, 1, 2], [3, 4, 5]][world.rank]
        assert (whole + whole).to_local().tolist() == [0, 2]
        with pytest.raises(CollectiveAborted, match=r"on ranks that were given back \(2\)\. Make it anew"):
            split.to_global(sbp="B")

    run_ranks(program, 3)


def played_pool(names):
    """Engines with these variables by rank; None: an engine that has ended."""
    engines = PlayedEngines({})
    engines.num_ranks = len(names)
    engines.registered = lambda: [rank for rank, each in enumerate(names) if each is not None]
    pool = EnginePool(engines, "cpu", None)
    pool._engines, pool.ask, pool.prepare = engines, lambda rank, operation: names[rank], lambda ranks: None
    return pool


@pytest.mark.parametrize(
    ("names", "lost", "then", "expected"),
    [
        ([[], ["x"]], [0], 1, [1]),
        ([None, ["x"]], [], 1, [1]),  # nobody has noticed
        ([["x"], ["x"], ["x"], []], [3], 2, [2]),  # its slices
        ([["x"], ["x"], []], [2], 2, []),
        ([["x"], ["x"], None], [], 2, []),
        ([[], []], [0], 1, []),
        ([[], ["x"]], [0, 1], 1, [1]),  # made since all were replaced
        ([["x", "z"], ["x"]], [0], 1, []),  # cells have made it again
        ([["x"], ["x"]], [], 1, []),
    ],
)
def test_ranks_that_alone_have_variables_are_not_given_back(names, lost, then, expected):
    pool = played_pool(names)
    pool.losses.ranks = set(lost)
    assert pool.sole_holders(then) == {rank: ["x"] for rank in expected}
    if expected:
        with pytest.raises(SessionError, match=rf"resize\({then}\): rank {expected[0]}, .*still has .*: x\. .*recover"):
            pool.resize(then)
        assert not pool._engines.killed and pool.num_engines == len(names)


def test_engines_that_end_whenever_they_join_are_an_error():
    """Where memory ran out each time, they were started again without end."""
    pool, started = played_pool([["x"], None]), []
    played = pool._engines
    played.client, played.wait_until_gone, played.assign = None, lambda ranks: None, lambda ranks, ids: None
    played.start_engines = lambda client, ranks, on_progress: started.append(ranks) or ranks
    with pytest.raises(EngineStartError, match=r"rank 1 died 5 times in a row .*\(killed\)\. .* free memory"):
        pool.replace([1])
    assert started == [[1]] * 5


@pytest.mark.parametrize("lost", [[0], [0, 1]])
@pytest.mark.parametrize(("names", "said"), [([], "all variables are lost"), (["x"], "lost: x.")])
def test_the_loss_of_the_last_rank_with_variables_is_said(names, said, lost, capsys):
    pool = played_pool([names, None])
    pool.losses.ranks = set(lost)
    pool._describe_loss([1])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "names", "new", "then"),
    [
        ([], [None, None], [1], [1]),  # the first loss: nobody is asked
        ([0], [[], None], [1], [0, 1]),
        ([0], [["step"], None], [1], [1]),  # the user has run the cells again by hand
        ([0], [["library"], ["step"], ["step"]], [2], [0, 2]),
        ([0], [["step", "x"], ["step", "y"], []], [2], [0, 2]),
        ([0], [["step", "x"], ["step"], []], [2], [2]),
        ([0], [["step"], None, []], [2], [0, 2]),  # rank 1 has not answered
        ([0, 1], [["step"], ["step"]], [1], [1]),
        ([0, 1], [["step"], ["step"]], [2], [2]),  # the session grows
        ([0, 1], [[], []], [2], [0, 1, 2]),
        ([0, 1], [["step", "x"], ["step"], []], [2], [2]),
        ([0, 1], [["step"], [], []], [2], [1, 2]),
    ],
)
def test_ranks_are_lost_while_another_one_may_hold_more(before, names, new, then):
    """Those where cells have run since hold as much as the others."""
    losses = Losses(set(before))
    losses.add(new, len(names), names.__getitem__)
    assert sorted(losses.ranks) == then


def test_what_was_made_again_by_hand_comes_to_the_next_rank_that_is_lost():
    """Else no rank lacked anything, and rank 0 kept the first weights of its set-up cells beside trained ones."""
    pool = played_pool([["step"], []])
    pool.losses.add([1], 2)
    pool.ask = lambda rank, operation: [["step"], ["step"]][rank]
    pool._engines.wait_until_gone, pool._engines.client, pool._engines.assign = list, None, zip
    pool._processes.start_engines, pool._join_or_find_lost = lambda *_: [0], lambda _: set()
    pool.replace([0])
    assert pool.losses.ranks == {0} and pool.losses.lacking(2) == (0,)


def test_the_report_of_a_resize_says_what_to_do():
    first, row, advice = str(Resized(4, 2, [("model", "under *: data"), ("ema", "under *: data")])).splitlines()
    assert first == "workbench: 2 engines now, 4 before" and " ".join(row.split()) == "model, ema under *: data"
    assert advice.endswith("wb.parallelize(model, strategy, optimizer=optimizer)")
    report = str(Resized(2, 4, lacking=(2, 3)))
    assert "ranks 2-3 have no variables. To get them, run" in report and "%%global --setup" in report
    assert "ranks 1,3 have no variables. " in str(Resized(3, 4, lacking=(1, 3))), "rank 1 was lost before"
    assert "rank 2 has no variables. " in str(Resized(2, 3, lacking=(2,)))
    assert "Engines that had died were given back" in str(Resized(4, 2, has_lost_parts=True))
    assert str(Resized(2, 1)) == "workbench: 1 engine now, 2 before"
    assert "recovered ranks 2-3" in str(Resized(2, 4, [], Recovered((2, 3), 1, [("model", "rank 0")])))


def test_an_engine_is_replaced_before_the_controller_has_seen_its_end():
    replaced, dead = [], [1]
    processes = SimpleNamespace(num_ranks=2, replaces_at_once=True, dead=lambda ranks: dead, record_oom_kills=list)
    pool = EnginePool(processes, "cpu", folder=None)
    pool._engines = SimpleNamespace(registered=lambda: [0, 1])
    pool._describe_loss, pool.replace = list, replaced.append
    pool.prepare([0])
    assert replaced == [[1]]
