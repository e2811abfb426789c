"""What users of ``nn.Graph`` get wrong, and the errors that they get."""

from __future__ import annotations

import pytest

from tests.flow.running import run, source_of
from tests.flow.test_graph import OLD, Look, Step, data, linear, sgd_of
from workbench import flow
from workbench.errors import RunError, StrategyError
from workbench.testing import run_ranks
from workbench.training.pipelining.running_step import ValueReadWarning


class NoBuild(flow.nn.Graph):
    pass


class NoBackward(Step):
    def build(self, x, y):
        return self.model(x).sum()


class VectorLoss(Step):
    def build(self, x, y):
        self.model(x).backward()


class Reads(Step):
    def build(self, x, y):
        loss = self.model(x).sum()
        loss.backward()
        return loss.item()


class ReturnsWeights(Step):
    def build(self, x, y):
        super().build(x, y)
        return self.model.weight


def two_stages(first_id, second_id):
    model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2))
    model[0].config.stage_id, model[1].config.stage_id = first_id, second_id
    return Step(model, sgd_of(model))


def backwards_in_1f1b():
    """Stage 0 comes after stage 1 in the program."""
    first, second = flow.placement("cpu", ranks=[0]), flow.placement("cpu", ranks=[1])
    model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2))
    for stage, placement in ((1, second), (0, first)):
        model[1 - stage].to_global(placement, flow.sbp.broadcast, broadcast_from=0)
        model[1 - stage].config.set_stage(stage, placement)
    x, y = (flow.as_tensor(part).to_global(second, flow.sbp.broadcast, broadcast_from=0) for part in data())
    return Step(model, sgd_of(model), 2)(x, y.to_global(placement=first))


def two_stages_in_a_v():
    """Each stage has a rank of its own."""
    first, second = flow.placement("cpu", ranks=[0]), flow.placement("cpu", ranks=[1])
    model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2))
    for stage, placement in enumerate((first, second)):
        model[stage].to_global(placement, flow.sbp.broadcast, broadcast_from=0)
        model[stage].config.set_stage(stage, placement)
    x, y = (flow.as_tensor(part).to_global(first, flow.sbp.broadcast, broadcast_from=0) for part in data())
    step = Step(model, sgd_of(model), 2)
    step.config.schedule = "dualpipe_v"
    return step(x, y.to_global(placement=second))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (NoBuild, ["NoBuild", "def build"]),
        (lambda: NoBackward(model := linear(), sgd_of(model))(*data()), ["0 losses", "loss.backward()"]),
        (lambda: Step(linear())(*data()), ["1 loss", "0 optimizers", "add_optimizer"]),
        (lambda: VectorLoss(model := linear(), sgd_of(model))(*data()), ["2", "dims", "scalars"]),
        (lambda: Step(linear(), sgd_of(linear()))(*data()), ["2 of the 2 parameters", "SGD", "(2, 4)", "model"]),
        (lambda: Step(linear(), "sgd"), ["add_optimizer(str)", "flow.optim.SGD"]),
        (lambda: Step(linear(), sgd_of(linear()), lr_sch=3), ["lr_sch=int", "SGD"]),
        (lambda: two_stages(0, 2)(*data()), ["[0, 2]", "leave out 1"]),
        (lambda: Step(linear(), num_parts=0), ["set_gradient_accumulation_steps(0)", "at least 1"]),
        (
            lambda: Step(m := linear(), sgd_of(m), 2)(data()[0], data()[1][:4]),
            ["different numbers of rows", "(5, 4)", "(4, 2)"],
        ),
        (
            lambda: ReturnsWeights(m := linear(), sgd_of(m), 2)(*data()),
            ["(2, 4), (2, 4)", "2 micro-batches of [3, 2] samples", "dim 0, which has to count samples"],
        ),
        (backwards_in_1f1b, ["1f1b", "gpipe"]),
        (two_stages_in_a_v, ["dualpipe_v", "2 stages on each rank", "Use 1f1b"]),
    ],
)
def test_mistakes_are_told(wrong, words):
    with pytest.raises((StrategyError, RunError)) as caught:
        run_ranks(wrong, 2)
    for word in words:
        assert word in str(caught.value)


def test_unknown_settings_are_told():
    with pytest.raises(AttributeError, match=r"graph\.config\.enable_zero: .*schedule.*wb\.parallelize"):
        run_ranks(lambda: Look(linear()).config.enable_zero(True), 1)


@OLD
def test_a_value_of_another_stage_that_is_read_inside_a_step_is_told():
    source = source_of("graph_pipeline").replace("loss.backward()\n", "loss.backward()\n        loss.item()\n")
    with pytest.warns(ValueReadWarning, match="inside a step of 2 stages and 2 micro-batches at <program>"):
        run_ranks(lambda: run(source), 2)
