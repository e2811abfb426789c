"""Parameters and buffers that a module has under several names, and constants that several stages read."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from workbench.errors import LayoutError, StrategyError
from workbench.testing import run_ranks


class TwoNames(nn.Module):
    """Each of its own tensors has two names, and so has a layer; two layers share a buffer."""

    def __init__(self):
        super().__init__()
        self.second = self.first = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.layer = self.layer_again = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen_again", self.seen)
        self.layer.register_buffer("seen", self.seen)

    def forward(self, x):
        self.layer.seen += len(x)
        x = torch.tanh(self.layer(x @ self.first))
        return self.layer_again(x @ self.second) * (1 + self.seen_again / 100)


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=1", "*: data | zero=3", "*: model | mb=2"])
def test_what_has_two_names_stays_one(strategy):
    torch.manual_seed(0)
    one, x = TwoNames(), torch.randn(8, 4, dtype=torch.float64)
    copies = [copy.deepcopy(one) for _ in range(2)]

    def steps(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: getattr(v, "full_tensor", lambda v=v: v)().clone() for name, v in model.state_dict().items()}

    def program(rank):
        model = wb.parallelize(copies[rank], strategy)
        assert model.first is model.second and model.layer is model.layer_again
        assert model.seen is model.seen_again is model.layer.seen
        return steps(model)

    expected = steps(one)
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Scaled(nn.Module):
    """A buffer beside the layers, which a later stage reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.layer = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x):
        return self.layer(x @ self.weight) * self.factor


def test_a_constant_of_another_stage_is_read_again_after_files_were_loaded(tmp_path):
    torch.manual_seed(0)
    one, x = Scaled(), torch.randn(8, 4)
    copies = [copy.deepcopy(one) for _ in range(2)]
    one.factor.mul_(3)
    save_file(dict(one.state_dict()), tmp_path / "model.safetensors")

    def program(rank):
        model = wb.parallelize(copies[rank], "(root): data; layer: data@1 | 2x1x1 mb=2")
        before = wb.evaluate(model, x).full_tensor()
        wb.checkpoint.load_safetensors(model, tmp_path)
        return before, wb.evaluate(model, x).full_tensor()

    for before, after in run_ranks(program, 2):
        torch.testing.assert_close(after, one(x).detach())
        torch.testing.assert_close(before * 3, after)


class Holder(nn.Module):
    """Keeps its weight where torch does not see it."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        weight = self.layer.weight
        self.how, self.kept, self.multiply = how, [weight], lambda x: x @ weight.t()

    def forward(self, x):
        if self.how == "list":
            return self.layer(x) @ self.kept[0]
        return self.multiply(self.layer(x)) if self.how == "closure" else self.layer(x)


def holder(how):
    torch.manual_seed(0)
    return Holder(how)


@pytest.mark.parametrize("how", ["list", "closure", "penalty"])
def test_a_weight_from_before_is_an_error_where_it_meets_the_model(how):
    models = [holder(how) for _ in range(2)]

    def program(rank):
        before = models[rank].layer.weight
        model = wb.parallelize(models[rank], "*: data")
        loss = model(torch.ones(8, 4)).square().mean()
        return loss + 0.1 * before.norm() if how == "penalty" else loss

    with pytest.raises(LayoutError, match=r"parameter of shape \(4, 4\) from before wb.parallelize.*from its module"):
        run_ranks(program, 2)


def test_values_from_before_may_be_compared_without_gradients():
    models = [holder("") for _ in range(2)]

    def program(rank):
        before = models[rank].layer.weight
        model = wb.parallelize(models[rank], "*: data")
        with torch.no_grad():
            return (model.layer.weight - before).norm().item()

    assert run_ranks(program, 2) == [0.0, 0.0]


def test_a_plain_tensor_of_ones_own_may_learn_beside_the_model():
    models, scales = [holder("") for _ in range(2)], [torch.ones(4, requires_grad=True) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        (model(torch.ones(8, 4)) * (scales[rank] * 2).exp()).mean().backward()
        return scales[rank].grad is not None

    assert run_ranks(program, 2) == [True, True]


def shared_data():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def view_as_buffer():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("top", model[0].weight.detach()[2:])
    return model


def parts_of_one():
    whole, model = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    model.register_buffer("nothing", whole[:0])
    return model


def columns_of_one():
    whole, model = torch.randn(4, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])
    model.register_buffer("twice", torch.ones(1).expand(3))
    return model


def test_tensors_that_share_memory_are_refused_and_parts_of_one_are_not():
    wanted = {
        shared_data: r"'0.weight' and '1.weight' are two tensors.*64 bytes",
        view_as_buffer: r"'0.weight' and 'top'",
    }
    for make, message in wanted.items():
        with pytest.raises(StrategyError, match=rf"(?s){message}.*b.weight = a.weight"):
            run_ranks(lambda make=make: wb.parallelize(make(), "*: data"), 1)
    for make in (parts_of_one, columns_of_one):
        assert run_ranks(lambda make=make: wb.parallelize(make(), "*: model") is not None, 1) == [True]


def test_modules_with_one_weight_are_parallelized_in_one_call_or_share_the_layer():
    def program():
        actor, critic = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        actor[0].weight = critic[0].weight
        both = copy.deepcopy(nn.ModuleList([actor, critic]))
        wb.parallelize(actor, "*: data")
        with pytest.raises(StrategyError, match=r"(?s)'0.weight', of shape \(4, 4\).*nn.ModuleList"):
            wb.parallelize(critic, "*: data")
        wb.parallelize(both, "*: data")
        assert both[0][0].weight is both[1][0].weight
        other = wb.parallelize(nn.Sequential(actor[0], nn.Linear(4, 1)), "*: data")
        assert other[0].weight is actor[0].weight

    run_ranks(program, 1)
