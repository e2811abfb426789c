"""Operators of torch.library without a rule, and functions of torch.jit."""

import copy
import warnings

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import LayoutError
from workbench.testing import assert_equal_to_one_device, run_ranks

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("wbtests::swish", mutates_args=())
def swish(x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
    return factor * x * torch.sigmoid(x)


def _swish_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(x)
    grad = grad * (s + x * s * (1 - s))
    return grad / grad.norm()  # not linear


swish.register_fake(lambda x, *, factor=1.0: torch.empty_like(x))
swish.register_autograd(
    _swish_backward, setup_context=lambda ctx, inputs, keyword_only_inputs, output: ctx.save_for_backward(inputs[0])
)


@torch.library.custom_op("wbtests::track", mutates_args=("mean",))
def track(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
    return x - mean


track.register_fake(lambda x, mean: torch.empty_like(x))
WITHOUT_RULE = pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")


@WITHOUT_RULE
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_an_operator_without_a_rule_has_a_backward_on_plain_whole_tensors(sbp, ranks):
    expected = X.clone().requires_grad_()
    (swish(expected, factor=2.0) ** 2).sum().backward()

    def program():
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=ranks), sbp=sbp, requires_grad=True)
        (swish(x, factor=2.0) ** 2).sum().backward()
        assert_equal_to_one_device(x.grad, expected.grad)

    run_ranks(program, 2)


@WITHOUT_RULE
@pytest.mark.parametrize(("ranks", "sbp"), [([0, 1], "B"), ([0, 1], "S(0)"), ([1, 0], "B")])
def test_an_operator_writes_its_operands_wherever_they_lie(ranks, sbp):
    def program():
        mean = wb.zeros(4, placement=wb.placement("cpu", ranks=ranks), sbp=sbp)
        result = track(wb.ones(8, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)"), mean)
        return mean.full_tensor().tolist(), result.sum().item(), [str(entry) for entry in mean.sbp]

    assert run_ranks(program, 2) == [([0.5] * 4, 16.0, [sbp])] * 2


class Tracking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return track(self.second(self.first(x)).detach(), self.mean)


@WITHOUT_RULE
@pytest.mark.parametrize("strategy", ["*: data", "pipeline"])
def test_a_buffer_that_an_operator_writes_is_that_of_one_device(strategy):
    torch.manual_seed(0)
    one = Tracking()
    models = [copy.deepcopy(one) for _ in range(2)]
    expected = one(X)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        return model(X).full_tensor(), model.mean.full_tensor()

    for result, mean in run_ranks(program, 2):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(mean, one.mean)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch.ops.wbtests.swish(x, 2.0), "swish.*too many positional arguments.*Its schema is"),
        (lambda x: torch.ops.wbtests.swish(x, slope=2.0), "swish.*slope"),
        (lambda x: torch.ops.wbtests.track(x), "track.*missing a required argument.*mean"),
    ],
)
def test_an_operator_refuses_arguments_that_its_schema_lacks(call, message):
    def program():
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with pytest.raises(TypeError, match=message):
            call(x)

    run_ranks(program, 2)


@torch.library.custom_op("wbtests::adam_", mutates_args=("p", "m"))
def adam_(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(m)


@torch.library.custom_op("wbtests::track_", mutates_args=("mean",))
def track_(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    mean.add_(x.mean(0))
    return x - mean


track_.register_fake(lambda x, mean: torch.empty_like(x))
LIBRARY = torch.library.Library("wbtests", "FRAGMENT")
LIBRARY.define("shift_(Tensor(a!) x, float by) -> Tensor(a!)")
LIBRARY.impl("shift_", lambda x, by: x.add_(by), "CompositeExplicitAutograd")


@WITHOUT_RULE
@pytest.mark.parametrize("sbp", ["B", "S(0)", "P"])
def test_an_operator_with_a_name_in_place_writes_what_its_schema_says(sbp):
    def program():
        p, g, m, mean = (wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp=sbp) for _ in range(4))
        x = wb.ones(8, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with torch.no_grad():
            assert adam_(p, g, m) is None
            shifted = torch.ops.wbtests.shift_(g, 2.0)
            result = track_(x, mean)
        assert shifted is g
        found = [each.full_tensor()[0].item() for each in (p, g, m, mean)]
        return found, x.sum().item(), result.sum().item(), {str(each.sbp[0]) for each in (p, g, m, mean)}

    assert run_ranks(program, 2) == [([pytest.approx(-0.9), 3.0, pytest.approx(1.9), 2.0], 32.0, -32.0, {sbp})] * 2


def moving_mean(mean, new, decay: float):
    mean.mul_(decay).add_(new, alpha=1 - decay)
    return mean


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    moving_mean = torch.jit.script(moving_mean)


@WITHOUT_RULE
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sbp", ["B", "S(0)", "P"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_a_scripted_function_writes_its_operands_wherever_they_lie(ranks, sbp, mode):
    def program():
        with mode():
            mean = wb.zeros(8, 4, placement=wb.placement("cpu", ranks=ranks), sbp=sbp)
            result = moving_mean(mean, wb.ones(8, 4, placement=mean.placement, sbp="S(0)"), 0.25)
        assert [str(entry) for entry in mean.sbp] == [sbp]
        return mean.full_tensor().sum().item(), result.sum().item()

    assert run_ranks(program, 2) == [(24.0, 24.0)] * 2


@WITHOUT_RULE
def test_a_scripted_function_that_writes_what_has_a_gradient_is_refused():
    def program():
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)", requires_grad=True)
        with pytest.raises(LayoutError, match=r"moving_mean: it writes into an operand of shape \(8, 4\), S\(0\)"):
            moving_mean(x * 1, X, 0.5)

    run_ranks(program, 2)
