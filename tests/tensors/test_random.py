"""Random tensors do not depend on the layout, the number of ranks, or on being one device."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.testing import run_ranks


def _of(make):
    """A maker from a function of a tensor of ones."""
    return lambda p, s: make(wb.ones(5, 6, placement=p, sbp=s))


def _full(value, make, shape=(5, 6), dtype=torch.float32):
    return lambda p, s: make(wb.full(shape, value, placement=p, sbp=s, dtype=dtype))


def _generator():
    return torch.Generator().manual_seed(3)


def _ramp(make):
    return lambda p, s: make(wb.arange(30.0, placement=p, sbp="B").reshape(5, 6).to_global(sbp=s))


def _attention(p, s):
    q = wb.randn(5, 6, 4, placement=p, sbp=s)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum(-1)


def _fractional(x):
    planes = (torch.arange(48) * 7 % 48).reshape(6, 8) + x.reshape(5, 6, 1, 1)
    return F.fractional_max_pool2d(planes, 2, (4, 5))[..., 1, 1]


def _fractional_indices(x):
    planes = x.reshape(5, 6, 1, 1, 1).repeat(1, 1, 7, 7, 7)
    return F.fractional_max_pool3d(planes, 2, (4, 4, 4), return_indices=True)[1][..., 1, 1, 1]


def _low_rank(x):
    left, values, right = torch.svd_lowrank(x * 7 % 11, 2, niter=0)
    return left * values @ right.T


def _lstm(p, s):
    x = wb.randn(5, 6, 4, placement=p, sbp=s)
    weights = [
        wb.randn(*shape, placement=p, sbp="B") for _ in range(2) for shape in ((12, 4 - _), (12, 3), (12,), (12,))
    ]
    states = tuple(wb.zeros(2, 5, 3, placement=p, sbp="B") for _ in range(2))
    return torch.lstm(x, states, weights, True, 2, 0.5, True, False, True)[0].sum(-1)


MAKERS = {
    "randn": lambda p, s: wb.randn(5, 6, placement=p, sbp=s),
    "rand": lambda p, s: wb.rand(5, 6, placement=p, sbp=s),
    "rand double": lambda p, s: wb.rand(5, 6, placement=p, sbp=s, dtype=torch.float64),
    "rand half": lambda p, s: wb.rand(5, 6, placement=p, sbp=s, dtype=torch.bfloat16),
    "randn complex": lambda p, s: torch.view_as_real(wb.randn(5, 6, placement=p, sbp=s, dtype=torch.complex64)).sum(-1),
    "randint": lambda p, s: wb.randint(0, 100, (5, 6), placement=p, sbp=s),
    "randperm": lambda p, s: wb.randperm(30, placement=p, sbp="B").reshape(5, 6).to_global(sbp=s),
    "rand_like": _of(torch.rand_like),
    "randn_like": _of(lambda x: torch.randn_like(x, dtype=torch.float64)),
    "randint_like": _of(lambda x: torch.randint_like(x, 3, 50)),
    "normal means": _ramp(lambda x: torch.normal(x, 0.5)),
    "normal deviations": _ramp(lambda x: torch.normal(1.0, x, generator=_generator())),
    "normal both": _ramp(lambda x: torch.normal(x, torch.full((6,), 0.1))),
    "bernoulli": _full(0.3, torch.bernoulli),
    "bernoulli number": _of(lambda x: torch.bernoulli(x, 0.3)),
    "multinomial": _ramp(lambda x: torch.multinomial(x + 1, 6)),
    "multinomial again": _ramp(lambda x: torch.multinomial(x, 6, replacement=True)),
    "poisson": _ramp(torch.poisson),
    "binomial": _ramp(lambda x: torch.binomial(x, torch.full((5, 6), 0.4))),
    "gamma": _full(2.5, torch._standard_gamma),
    "normal_": _of(lambda x: x.normal_(1.0, 2.0)),
    "uniform_": _of(lambda x: x.uniform_(-1, to=1)),
    "generator": _of(lambda x: x.uniform_(generator=_generator())),
    "rand out": _of(lambda x: torch.rand(5, 6, out=x)),
    "randn out": _of(lambda x: torch.randn((5, 6), out=x)),
    "randint out": _of(lambda x: torch.randint(3, 90, (5, 6), out=x.long())),
    "normal out": _of(lambda x: torch.normal(1.0, 2.0, (5, 6), out=x)),
    "bernoulli out": _ramp(lambda x: torch.bernoulli(x / 30, out=torch.zeros_like(x))),
    "bernoulli_": _of(lambda x: x.bernoulli_(0.3)),
    "bernoulli_ tensor": _of(lambda x: x.bernoulli_(torch.linspace(0, 1, 6))),
    "exponential_": _of(lambda x: x.exponential_(lambd=2.0)),
    "geometric_": _of(lambda x: x.geometric_(0.2)),
    "log_normal_": _of(lambda x: x.log_normal_(0.0, std=0.5)),
    "cauchy_": _of(lambda x: x.cauchy_(1.0, 0.1)),
    "random_": _full(0, lambda x: x.random_() % 1000, dtype=torch.int64),
    "random_ from to": _of(lambda x: x.random_(5, 90)),
    "random_ to": _of(lambda x: x.random_(90)),
    "dropout": _of(F.dropout),
    "dropout in place": _of(lambda x: F.dropout(x, 0.5, inplace=True)),
    "alpha_dropout": _of(lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "feature_alpha_dropout": _full(1.0, lambda x: F.feature_alpha_dropout(x, 0.5, True)[..., 1], (5, 6, 3)),
    "dropout1d": _full(1.0, lambda x: F.dropout1d(x)[..., 1], (5, 6, 3)),
    "dropout2d": _full(1.0, lambda x: F.dropout2d(x)[..., 0, 1], (5, 6, 2, 3)),
    "dropout3d": _full(1.0, lambda x: F.dropout3d(x)[..., 0, 1, 0], (5, 6, 2, 3, 2)),
    "rrelu": _full(-1.0, lambda x: F.rrelu(x, training=True)),
    "gumbel_softmax": _of(F.gumbel_softmax),
    "fractional pool": _ramp(_fractional),
    "fractional pool indices": _ramp(_fractional_indices),
    "low rank": _ramp(_low_rank),
    "attention": _attention,
    "lstm": _lstm,
    "init uniform": _of(lambda x: nn.init.uniform_(x, -1, 1, generator=_generator())),
    "init normal": _of(nn.init.normal_),
    "init trunc": _of(lambda x: nn.init.trunc_normal_(x, std=0.5)),
    "init trunc tail": _of(lambda x: nn.init.trunc_normal_(x, mean=0.0, std=1.0, a=2.0, b=3.0)),
    "init kaiming": _of(lambda x: nn.init.kaiming_uniform_(x, a=5**0.5)),
    "init kaiming normal": _of(nn.init.kaiming_normal_),
    "init xavier": _of(nn.init.xavier_uniform_),
    "init xavier normal": _of(nn.init.xavier_normal_),
    "init orthogonal": _of(nn.init.orthogonal_),
    "init orthogonal 4d": _full(0.0, lambda x: nn.init.orthogonal_(x)[..., 1, 0], (5, 6, 2, 2)),
    "init eye": _of(nn.init.eye_),
    "init dirac": _full(0.0, lambda x: nn.init.dirac_(x)[..., 1], (5, 6, 3)),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_numbers_for_every_layout_and_world(name):
    def program(rank):
        world_size = wb.world_size()
        values = []
        everyone = list(range(world_size))
        layouts = [(everyone, sbp) for sbp in ("S(0)", "S(1)", "B", "P")] + [([0], "S(1)"), (everyone[::-1], "S(0)")]
        for ranks, sbp in layouts:
            wb.manual_seed(7)
            x = MAKERS[name](wb.placement("cpu", ranks=ranks), sbp)
            values.append(x.detach().to_global(placement=wb.placement.all("cpu"), sbp="B").to_local())
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        reference, *others = run_ranks(program, 1)[0]
        assert reference.shape == (5, 6) and reference.float().std() > 0
        for values in [others, *run_ranks(program, 3)]:
            for value in values:
                tolerance = 1e-6 * (name in ROUNDED)
                torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)


ROUNDED = {"attention", "low rank", "gumbel_softmax", "lstm", "normal means", "init orthogonal", "init orthogonal 4d"}
"""Functions that compute with their random numbers: sums over shards are rounded otherwise."""


@pytest.mark.parametrize(("dtype", "part"), [(torch.complex64, torch.float32), (torch.complex128, torch.float64)])
def test_complex_numbers_are_pairs_of_real_ones(dtype, part):
    def program():
        made = []
        for shape, kind in (((5,), dtype), ((5, 2), part)):
            wb.manual_seed(3)
            made.append(wb.rand(*shape, placement=wb.placement.all("cpu"), sbp="S(0)", dtype=kind).to_local())
        return torch.equal(torch.view_as_real(made[0]), made[1])

    assert run_ranks(program) == [True, True]


def test_distributions_draw_one_number_per_element():
    made = {
        "Laplace": lambda x: torch.distributions.Laplace(x, 1.0),
        "Exponential": torch.distributions.Exponential,
        "Cauchy": lambda x: torch.distributions.Cauchy(x, 1.0),
        "Weibull": lambda x: torch.distributions.Weibull(x, 1.0),
        "Pareto": lambda x: torch.distributions.Pareto(1.0, x),
        "Geometric": lambda x: torch.distributions.Geometric(x / 9),
    }

    def program():
        found = []
        for sbp in ("B", "S(0)"):
            wb.manual_seed(1)
            x = wb.ones(5, placement=wb.placement.all("cpu"), sbp=sbp)
            found.append({name: make(x).sample((7,)).full_tensor() for name, make in made.items()})
        return found

    whole, split = run_ranks(program, 2)[0]
    for name in made:
        assert whole[name].shape == (7, 5) and len(whole[name].unique()) > (34 if name != "Geometric" else 4), name
        torch.testing.assert_close(whole[name], split[name], msg=name)


def test_two_draws_differ_and_a_seed_repeats_them():
    def program(rank):
        p = wb.placement.all("cpu")
        wb.manual_seed(1)
        first, second = (wb.randn(8, placement=p, sbp="S(0)").full_tensor() for _ in range(2))
        wb.manual_seed(1)
        return first, second, wb.randn(8, placement=p, sbp="S(0)").full_tensor()

    first, second, again = run_ranks(program, 2)[0]
    assert not torch.equal(first, second) and torch.equal(first, again)


def test_dropout_drops_the_right_share_and_its_gradient_follows_the_mask():
    def program(rank):
        x = wb.ones(200, 100, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        y = F.dropout(x, 0.25)
        y.sum().backward()
        return y.detach().full_tensor(), x.grad.full_tensor()

    value, grad = run_ranks(program, 2)[0]
    assert abs((value == 0).float().mean().item() - 0.25) < 0.01
    assert torch.equal(value, grad) and value.max().item() == pytest.approx(4 / 3)


def _quantiles(values):
    return torch.quantile(values.double().flatten(), torch.linspace(0.05, 0.95, 19, dtype=torch.float64))


DISTRIBUTIONS = {
    "uniform_": lambda x: x.uniform_(-1, 3),
    "uniform_ half": lambda x: x.half().uniform_(),
    "uniform_ double": lambda x: x.double().uniform_(),
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "exponential_": lambda x: x.exponential_(0.5),
    "geometric_": lambda x: x.geometric_(0.1),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.25),
    "cauchy_": lambda x: x.cauchy_(1.0, 0.5),
    "random_": lambda x: x.random_(-20, 300),
    "poisson": lambda x: torch.poisson(x * 40.0),
    "poisson small": lambda x: torch.poisson(x * 3.5),
    "binomial": lambda x: torch.binomial(x * 40.0, x * 0.3),
    "multinomial": lambda x: torch.multinomial(torch.linspace(0, 1, 50) * x[:, :1], 5, replacement=True),
    "multinomial once": lambda x: torch.multinomial(torch.linspace(0, 1, 50) * x[:, :1], 5),
    "alpha_dropout": lambda x: F.alpha_dropout(x * torch.linspace(-1, 1, 30), 0.27, training=True),
    "rrelu": lambda x: F.rrelu(x * -2.0, 0.2, 0.9, training=True),
    "gamma": lambda x: torch._standard_gamma(x * 2.0),
}


def test_numbers_are_distributed_as_torch_distributes_them():
    def program():
        wb.manual_seed(5)
        p = wb.placement.all("cpu")
        return [draw(wb.ones(2000, 30, placement=p, sbp="S(0)")).full_tensor() for draw in DISTRIBUTIONS.values()]

    torch.manual_seed(5)
    for (name, draw), found in zip(DISTRIBUTIONS.items(), run_ranks(program, 2)[0], strict=True):
        expected = draw(torch.ones(2000, 30))
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        spread = _quantiles(expected)[-1] - _quantiles(expected)[0]
        off = ((_quantiles(found) - _quantiles(expected)).abs() / spread).max()
        # One step of a discrete distribution, or the sampling error of the steepest quantile.
        step = 1 / spread if name.startswith(("geometric", "random", "poisson", "binomial", "multinomial")) else 0.0
        assert off < 0.04 + step, f"{name}: quantiles are off by {off:.3f} of their spread"


def test_numbers_at_different_positions_are_independent():
    def program():
        x = wb.rand(4096, 8, placement=wb.placement.all("cpu"), sbp="S(0)", dtype=torch.float64)
        return x.full_tensor()

    correlations = torch.corrcoef(run_ranks(program, 2)[0].T) - torch.eye(8)
    assert correlations.abs().max() < 5 / 4096**0.5


REFUSED = {
    "uniform_": lambda x: x.uniform_(2, 1),
    "uniform_ by name": lambda x: x.uniform_(to=-1),
    "uniform_ of integers": lambda x: x.long().uniform_(),
    "exponential_": lambda x: x.exponential_(-1),
    "geometric_": lambda x: x.geometric_(1.5),
    "cauchy_": lambda x: x.cauchy_(0, -1),
    "log_normal_": lambda x: x.log_normal_(0, -1),
    "normal_": lambda x: x.normal_(0, -1),
    "bernoulli_": lambda x: x.bernoulli_(2),
    "bernoulli with a number": lambda x: torch.bernoulli(x, -0.5),
    "random_": lambda x: x.random_(3, 2),
    "random_ bytes": lambda x: x.byte().random_(0, 300),
    "randint_like": lambda x: torch.randint_like(x.byte(), 300),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.int64),
    "randn_like": lambda x: torch.randn_like(x.long()),
    "normal out": lambda x: torch.normal(0.0, -1.0, (4, 2), out=x),
    "randint out": lambda x: torch.randint(0, 300, (4, 2), out=x.byte()),
    "randperm out": lambda x: torch.randperm(300, out=x.byte()),
    "normal": lambda x: torch.normal(x, -1.0),
    "multinomial of three dims": lambda x: torch.multinomial(x.reshape(2, 2, 2), 1),
    "init normal": lambda x: nn.init.normal_(x, 0, -1),
}
BY_VALUE = {
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: torch.zeros_like(x).bernoulli_(x),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "multinomial again": lambda x: torch.multinomial(x, 3, replacement=True),
    "normal deviations": lambda x: torch.normal(0.0, x),
    "normal both": lambda x: torch.normal(x, x),
    "poisson": torch.poisson,
    "multinomial of zeros": lambda x: torch.multinomial(x + x.flip(1), 1),
}


_ABOUT = "p_in|probabilit|std|Poisson"


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_torch_refuses_are_refused_on_all_ranks(name):
    with pytest.raises(RuntimeError) as refused:
        REFUSED[name](torch.ones(4, 2))
    torch.manual_seed(0)
    before = torch.get_rng_state()

    def program():
        x = wb.ones(4, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with pytest.raises(type(refused.value)):
            REFUSED[name](x)

    run_ranks(program, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", BY_VALUE)
def test_values_that_torch_refuses_are_an_error_of_the_rank_that_has_them(name):
    values = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, -0.5]])
    with pytest.raises(RuntimeError, match=_ABOUT):
        BY_VALUE[name](values)

    def program():
        x = wb.to_global(values, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        BY_VALUE[name](x[:2].to_global(sbp="S(0)"))
        BY_VALUE[name](x.to_global(sbp="S(0)"))

    with pytest.raises(RuntimeError, match=_ABOUT):
        run_ranks(program, 3)


OF_OTHER_DTYPES = {
    "rand": lambda made_by, **layout: made_by.rand(4, dtype=torch.int64, **layout),
    "randn": lambda made_by, **layout: made_by.randn(4, dtype=torch.int32, **layout),
    "randint": lambda made_by, **layout: made_by.randint(0, 300, (4,), dtype=torch.uint8, **layout),
    "randint below zero": lambda made_by, **layout: made_by.randint(-1, 9, (4,), dtype=torch.uint8, **layout),
    "randperm": lambda made_by, **layout: made_by.randperm(257, dtype=torch.uint8, **layout),
    "randperm in half": lambda made_by, **layout: made_by.randperm(2050, dtype=torch.float16, **layout),
}


@pytest.mark.parametrize("name", OF_OTHER_DTYPES)
def test_a_dtype_that_does_not_hold_the_numbers_is_refused(name):
    make = OF_OTHER_DTYPES[name]
    with pytest.raises(RuntimeError):
        make(torch)

    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        with pytest.raises(RuntimeError):
            make(wb, placement=placement, sbp="S(0)")
        return wb.randperm(256, placement=placement, sbp="S(0)", dtype=torch.uint8).full_tensor().sort().values

    for found in run_ranks(program, 3):
        assert torch.equal(found, torch.arange(256, dtype=torch.uint8))


def test_native_dropout_drops_where_nothing_is_said_of_training():
    def program():
        x = wb.ones(40, 4, placement=wb.placement.all(), sbp="S(0)")
        return [part.full_tensor() for part in torch.native_dropout(x, 0.5, None)]

    for dropped, mask in run_ranks(program, 2):
        assert torch.equal(dropped, mask * 2.0) and 0 < mask.sum() < mask.numel()
