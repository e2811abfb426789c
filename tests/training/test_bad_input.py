"""Strategies that cannot be: errors that say both numbers, the rule and the fix, on every rank, and change nothing."""

import copy
import io

import pytest
import torch
from torch import nn

import workbench as wb
from tests.models.zoo import batch_for, make
from tests.training.training_runs import Setup
from workbench.errors import CheckpointError, LayoutError, StrategyError
from workbench.testing import run_ranks


def errors_of(models, strategy, error=StrategyError):
    def program(rank):
        with pytest.raises(error) as caught:
            wb.parallelize(models[rank], strategy)
        assert all(type(parameter.data) is torch.Tensor for parameter in models[rank].parameters())
        return str(caught.value)

    return run_ranks(program, len(models))


def test_all_mistakes_are_listed_at_once():
    models = [make("gpt2") for _ in range(2)]
    text = "transformer.h.7: model; transformer.wte: data; lm_head: model; transformer.ln_f: data@2 | 2x2x2 mb=2"
    for message in errors_of(models, text):
        for part in (
            "no layer matches 'transformer.h.7'; nearest: transformer.h.1",
            "stage 1 has no layer",
            "2 x 2 x 2 = 8, but there are 2 ranks",
            "pipeline degree 2, but the rows use 3 stages",
            "lm_head: shares its weight (37, 24) with transformer.wte",
        ):
            assert part in message


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("*: data | 1x3x1", "1 x 3 x 1 = 3, but there are 2 ranks"),
        ("0: data; 3: data@2", "stage 1 has no layer"),
        ("0: data; 3: data@1 | 1x2x1", "pipeline degree 1, but the rows use 2 stages"),
    ],
)
def test_degrees_and_stages(strategy, message):
    models = [Setup("mlp").model() for _ in range(2)]
    assert all(message in found for found in errors_of(models, strategy))


def test_lazy_layers_have_no_shapes_yet():
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))

    def refused():
        with pytest.raises(StrategyError, match=r"layer '1' \(LazyLinear\): weight, bias of 2 .*on a batch first"):
            wb.parallelize(copy.deepcopy(lazy), "*: model")

    run_ranks(refused)
    lazy(torch.ones(2, 4))
    assert run_ranks(lambda: wb.parallelize(copy.deepcopy(lazy), "*: model")[1].weight.shape) == [(3, 4)] * 2


def test_heads_that_do_not_divide_are_handled():
    """Four heads (of keys: two) on three ranks: some hold more, the numbers are one device's."""
    models, batch = [make("llama", "sdpa") for _ in range(4)], batch_for("llama")
    expected = models[3](**batch)
    expected.loss.backward()
    truth = models[3].model.layers[0].self_attn.k_proj.weight.grad

    def program(rank):
        model = wb.parallelize(models[rank], "*: model")
        loss = model(**batch).loss
        loss.backward()
        return loss.item(), model.model.layers[0].self_attn.k_proj.weight.grad.full_tensor()

    for loss, grad in run_ranks(program, 3):
        assert loss == pytest.approx(expected.loss.item(), rel=1e-5)
        torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["*: data", "*: model"])
@pytest.mark.parametrize("makes_it", [False, True])
def test_nested_tensors_are_refused(strategy, makes_it):
    """Each rank would run all of them, and add its gradients."""
    samples = [torch.ones(2, 3), torch.ones(5, 3)]
    nested = lambda: torch.nested.nested_tensor(samples, layout=torch.jagged)  # noqa: E731

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(nested() if makes_it else x)

    one = Model()

    def program():
        model = wb.parallelize(copy.deepcopy(one), strategy)
        with pytest.raises(LayoutError, match=r"layer 'fc': an input is a nested tensor.*of 2 samples.*to_padded"):
            model(torch.ones(2, 3) if makes_it else nested())

    run_ranks(program, 2)


def test_more_ranks_than_features_or_samples():
    """A rank may hold nothing of a weight or of the batch."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 3)) for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = torch.randn(2, 5)
    models[3](x).square().sum().backward()

    def program(rank, strategy):
        model = wb.parallelize(models[rank], strategy)
        model(x).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    for strategy in ("*: model", "*: data"):
        for grads in run_ranks(lambda rank, s=strategy: program(rank, s), 3):
            for found, parameter in zip(grads, models[3].parameters(), strict=True):
                torch.testing.assert_close(found, parameter.grad)
        for model in models[:3]:
            model.zero_grad()


@pytest.mark.filterwarnings("ignore:torch.save or pickle")
@pytest.mark.parametrize("options", ["", " | zero=3 bf16", " | offload=activations recompute"])
def test_a_parallelized_module_is_copied_but_not_pickled(options):
    """Its hooks belong to the ranks of a world; torch's message named one of them."""
    torch.manual_seed(0)
    models, x = [nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2)], torch.randn(2, 5)
    models[1].load_state_dict(models[0].state_dict())

    def program(rank):
        model = wb.parallelize(models[rank], f"0: model; 2: data{options}")
        for part in (model, *([] if options else model[::2])):
            with pytest.raises(CheckpointError, match=r"cannot be pickled.*wb\.checkpoint\.save\(path, model=model\)"):
                torch.save(part, io.BytesIO())
        return model(x).tolist(), copy.deepcopy(model)(x).tolist()

    for expected, found in run_ranks(program, 2):
        assert found == expected
