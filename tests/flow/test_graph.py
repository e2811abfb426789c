"""``nn.Graph``: the listing of the document on pipelines trains to one device's losses, and what users get wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.flow.running import run, source_of
from workbench import flow
from workbench.testing import run_ranks

OLD = pytest.mark.filterwarnings("ignore:.*is the older spelling:DeprecationWarning")
LOOP = "for i in range(20):"


def plain_losses(weights, x, y, num_steps, lr=0.001):
    """Losses of the document's network, written with torch alone, on one device."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10), nn.ReLU()
    )
    if weights is not None:
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.data = value.clone()
    sgd, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for _ in range(num_steps):
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses


def whole(tensor):
    return tensor.detach().to_global(flow.placement.all("cpu"), flow.sbp.broadcast).to_local().clone()


def pipeline_losses(num_steps, source):
    """Losses of the listing on this rank; weights and data from which it has started."""
    names = run(source.partition(LOOP)[0])
    graph, x, y = names["graph_pipeline"], names["x"], names["y"]
    weights, data = [whole(p) for p in graph.module_pipeline.parameters()], (whole(x), whole(y))
    losses = [graph(x, y).item() for _ in range(num_steps)]
    return losses, weights, data, graph


@OLD
def test_the_pipeline_of_the_document_trains_as_on_one_device():
    def program(rank):
        losses, weights, data, graph = pipeline_losses(20, source_of("graph_pipeline"))
        assert [str(span.action) for span in graph.spans] == [
            ["0F0", "0F1", "0B0", "0B1"],
            ["1F0", "1B0", "1F1", "1B1"],
        ][rank]
        assert [len(spans) for spans in graph.timeline().spans] == [4, 4]
        assert repr(graph) == "PipelineGraph(2 micro-batches, stage 0 on [0], stage 1 on [1])"
        return losses, weights, data

    (losses, weights, data), (losses_on_1, _, _) = run_ranks(program, 2)
    assert losses == losses_on_1
    torch.testing.assert_close(losses, plain_losses(weights, *data, 20), rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError):  # the comparison can fail
        torch.testing.assert_close(losses, plain_losses(weights, *data, 20, lr=0.0011), rtol=1e-6, atol=1e-6)


@OLD
@pytest.mark.parametrize(
    ("num_parts", "where"), [(3, "P1 = flow.placement"), pytest.param(16, "", marks=pytest.mark.slow), (20, "")]
)
def test_any_number_of_micro_batches_on_one_rank_or_two(num_parts, where):
    source = source_of("graph_pipeline").replace("accumulation_steps(2)", f"accumulation_steps({num_parts})")
    if where:  # both stages on rank 0: one after the other
        source = source.replace('flow.placement("cuda", {0: [1]})', 'flow.placement("cuda", {0: [0]})')

    def program():
        losses, weights, data, graph = pipeline_losses(3, source)
        kinds = "".join(span.action.kind for span in graph.spans)
        return losses, weights, data, kinds

    (losses, weights, data, kinds), _ = run_ranks(program, 2)
    assert kinds == "FB" * 3 if where else len(kinds) == 2 * 16
    torch.testing.assert_close(losses, plain_losses(weights, *data, 3), rtol=1e-6, atol=1e-6)


class Step(flow.nn.Graph):
    def __init__(self, model, optimizer=None, num_parts=1, **options):
        super().__init__()
        self.model = model
        self.config.set_gradient_accumulation_steps(num_parts)
        if optimizer is not None:
            self.add_optimizer(optimizer, **options)

    def build(self, x, y):
        out = self.model(x)
        loss = flow.nn.functional.mse_loss(out, y)
        loss.backward()
        return {"loss": loss, "out": out, "rows": x.shape[0]}


class Look(flow.nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def linear():
    layer = flow.nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
        layer.bias.zero_()
    return layer


def sgd_of(model):
    return flow.optim.SGD(model.parameters(), lr=0.1)


def test_a_local_model_trains_with_a_schedule_of_rates_and_uneven_micro_batches():
    def program():
        model = linear()
        adam = flow.optim.Adam(model.parameters(), lr=0.1)
        graph = Step(model, adam, 2, lr_sch=flow.optim.lr_scheduler.StepLR(adam, 1, 0.5))
        return [graph(*data()) for _ in range(3)], Look(model)(data()[0])

    ((found, seen),) = run_ranks(program, 1)
    model, (x, y) = linear(), data()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    for step in found:
        loss = F.mse_loss(model(x), y)
        torch.testing.assert_close(torch.Tensor(step["loss"]), loss.detach())
        torch.testing.assert_close(torch.Tensor(step["out"]), model(x).detach())
        assert step["rows"] == [3, 2] and not step["loss"].requires_grad
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    torch.testing.assert_close(torch.Tensor(seen), model(x).detach())
    assert not seen.requires_grad


def test_samples_split_over_ranks_stay_split():
    def program():
        p = flow.placement("cpu", ranks=[0, 1])
        model = linear().to_global(p, flow.sbp.broadcast)
        graph = Step(model, flow.optim.SGD(model.parameters(), lr=0.1), 2)
        x, y = (torch.cat([part] * 2)[:8] for part in data())
        x, y = (flow.as_tensor(part).to_global(p, flow.sbp.broadcast).to_global(sbp="S(0)") for part in (x, y))
        steps = [graph(x, y) for _ in range(2)]
        return [step["loss"].item() for step in steps], [str(part.sbp) for part in (steps[0]["out"], model.weight)]

    (losses, layouts), _ = run_ranks(program, 2)
    model, (x, y) = linear(), (torch.cat([part] * 2)[:8] for part in data())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for found in losses:
        loss = F.mse_loss(model(x), y)
        assert found == pytest.approx(loss.item(), rel=1e-6)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    assert layouts == ["(S(0),)", "(B,)"]


def test_inputs_are_brought_to_the_placement_of_a_stage():
    def program():
        first, second = flow.placement("cpu", ranks=[0]), flow.placement("cpu", ranks=[1])
        model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2))
        for stage, placement in enumerate((first, second)):
            model[stage].to_global(placement, flow.sbp.broadcast)
            model[stage].to(flow.nn.graph.GraphModule).set_stage(stage, placement)
        graph = Step(model, flow.optim.SGD(model.parameters(), lr=0.1), 2)
        x, y = (flow.as_tensor(part).to_global(first, flow.sbp.broadcast) for part in data())
        y = y.to_global(placement=second)
        return graph(x, y)["loss"].item(), [str(span.action) for span in graph.spans]

    (loss, _), (loss_on_1, actions) = run_ranks(program, 2)
    assert loss == loss_on_1 and actions == ["1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize("ranks", [([1], [1, 2]), ([1], [2]), ([[1, 2]], [2, 1])])
def test_layers_of_a_stage_are_on_some_of_its_ranks(ranks):
    torch.manual_seed(0)
    plain = nn.Sequential(linear(), nn.Linear(2, 2), nn.Linear(2, 2))
    state = copy.deepcopy(plain.state_dict())

    def program():
        placements = [flow.placement("cpu", ranks=each) for each in ([0], *ranks)]
        model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2), flow.nn.Linear(2, 2))
        model.load_state_dict(state)
        for layer, stage, placement in zip(model, (0, 1, 1), placements, strict=True):
            layer.to_global(placement, ["B"] * placement.num_axes)
            layer.config.set_stage(stage, placement)
        x, y = (flow.as_tensor(part).to_global(placements[0], flow.sbp.broadcast) for part in data())
        y = y.to_global(placements[2], ["B"] * placements[2].num_axes)
        return Step(model, sgd_of(model), 3)(x, y)["loss"].item()

    x, y = data()
    assert run_ranks(program, 3) == [pytest.approx(F.mse_loss(plain(x), y).item(), rel=1e-5)] * 3


def test_precision_of_a_graph():
    def program():
        class Seen(Look):
            def build(self, x):
                out = self.model(x)
                assert out.dtype == flow.bfloat16
                return out

        graph = Seen(linear())
        graph.config.enable_amp(True)
        graph.config.allow_fuse_model_update_ops(True)
        return graph(data()[0]).dtype

    assert run_ranks(program, 1) == [torch.bfloat16]


def test_a_scaler_changes_no_numbers_and_skips_overflows():
    def program():
        p = flow.placement("cpu", ranks=[0, 1])
        found = []
        for scales in (False, True):
            model = linear().to_global(p, flow.sbp.broadcast)
            graph = Step(model, sgd_of(model), 2)
            if scales:
                graph.set_grad_scaler(scaler := torch.amp.GradScaler("cpu", init_scale=256.0))
            graph(*data())
            found.append(model.weight.full_tensor().detach().clone())
        graph(data()[0] * 1e30, data()[1])
        return *found, model.weight.full_tensor().detach(), scaler.get_scale()

    (plain, scaled, after, scale), _ = run_ranks(program, 2)
    torch.testing.assert_close(scaled, plain)
    assert torch.equal(after, scaled) and scale == 128.0


def test_a_graph_without_optimizer_runs_its_stages():
    def program():
        model = flow.nn.Sequential(linear(), flow.nn.Linear(2, 2))
        for stage in (0, 1):
            p = flow.placement("cpu", ranks=[stage])
            model[stage].to_global(p, flow.sbp.broadcast)
            model[stage].config.set_stage(stage, p)
        out = Look(model)(flow.as_tensor(data()[0]).to_global(flow.placement("cpu", ranks=[0]), flow.sbp.broadcast))
        weights = [whole(p) for p in model.parameters()]
        return out.placement.grid, whole(out), weights

    (grid, out, weights), _ = run_ranks(program, 2)
    assert grid == (1,)
    torch.testing.assert_close(out, F.linear(F.linear(data()[0], *weights[:2]), *weights[2:]))


def test_state_of_a_graph_goes_to_another():
    def program():
        graph, other = Look(linear()), Look(flow.nn.Linear(4, 2))
        other.load_state_dict(graph.state_dict())
        return torch.equal(graph.model.weight, other.model.weight)

    assert run_ranks(program, 1) == [True]


def test_state_of_other_modules_is_named_as_torch_does():
    def program():
        graph, state = Look(linear()), {"model": {"weight": torch.ones(2, 4)}, "other": {"bias": torch.ones(2)}}
        with pytest.raises(RuntimeError, match=r"Missing key.*model\.bias(.|\n)*Unexpected key.*other\.bias"):
            graph.load_state_dict(state)
        found = graph.load_state_dict(state, strict=False)
        return found.missing_keys, found.unexpected_keys, graph.model.weight.tolist()

    assert run_ranks(program, 1) == [(["model.bias"], ["other.bias"], [[1.0] * 4] * 2)]


def test_gradients_are_clipped_where_the_optimizer_says_so():
    def program():
        model = linear()
        sgd = flow.optim.SGD([{"params": model.parameters(), "clip_grad_max_norm": 0.01}], lr=1.0)
        Step(model, sgd, 2)(*data())
        return model.weight.detach(), model.weight.grad

    ((weight, grad),) = run_ranks(program, 1)
    model, (x, y) = linear(), data()
    F.mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(weight, (model.weight - model.weight.grad).detach())
    assert grad is None


def test_groups_of_parameters_scale_the_rate_and_the_schedule_goes_on():
    def program():
        model = linear()
        groups = [{"params": [model.weight], "lr_scale": 0.5}, {"params": [model.bias]}]
        sgd = flow.optim.SGD(groups, lr=0.1)
        graph = Step(model, sgd, 2, lr_sch=flow.optim.lr_scheduler.StepLR(sgd, 1, 0.1))
        for _ in range(2):
            graph(*data())
        return model.weight.detach(), model.bias.detach()

    (found,) = run_ranks(program, 1)
    model, (x, y) = linear(), data()
    for rate in (0.1, 0.01):
        weight, bias = torch.autograd.grad(F.mse_loss(model(x), y), [model.weight, model.bias])
        with torch.no_grad():
            model.weight -= 0.5 * rate * weight
            model.bias -= rate * bias
    torch.testing.assert_close(found, (model.weight.detach(), model.bias.detach()))


def test_a_recomputed_module_gives_the_same_numbers():
    def program():
        losses = []
        for recomputes in (False, True):
            p = flow.placement("cpu", ranks=[0, 1])
            model, calls = flow.nn.Sequential(linear(), flow.nn.Tanh()).to_global(p, flow.sbp.broadcast), []
            model[1].register_forward_hook(lambda *_, calls=calls: calls.append(1))
            model.config.activation_checkpointing = recomputes
            assert model.config.activation_checkpointing == recomputes
            graph = Step(model, sgd_of(model), 2)
            losses.append([graph(*data())["loss"].item() for _ in range(3)])
            assert len(calls) == (12 if recomputes else 6)
        return losses

    (plain, recomputed), _ = run_ranks(program, 2)
    assert plain == recomputed


def test_what_a_failed_step_leaves_behind_is_nothing():
    def program():
        model, graph = linear(), None
        graph = Step(model, sgd_of(model), 2)
        graph.fails = True
        build = graph.build

        def failing(x, y):
            found = build(x, y)
            if graph.fails and x.shape[0] == 2:  # the second micro-batch
                raise ValueError("the program's own")
            return found

        graph.build = failing
        with pytest.raises(ValueError, match="own"):
            graph(*data())
        assert model.weight.grad is None
        graph.fails = False
        graph(*data())
        return model.weight.detach()

    (weight,) = run_ranks(program, 1)
    model, (x, y) = linear(), data()
    F.mse_loss(model(x), y).backward()
    torch.testing.assert_close(weight, (model.weight - 0.1 * model.weight.grad).detach())


def test_modules_are_copied_and_pickled_with_their_stage():
    def program():
        model = linear().to_global(p := flow.placement("cpu", ranks=[0]), flow.sbp.broadcast)
        model.config.set_stage(1, p)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is flow.nn.Linear and other.config.stage_id == 1 and other.config._module is other
        return True

    assert run_ranks(program, 1) == [True]
