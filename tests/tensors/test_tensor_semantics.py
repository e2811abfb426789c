"""What a tensor can do besides arithmetic: data, copies, files, reads, conversions; as one device does it."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA, LAYOUTS, PARTIAL, Layer, assert_as_one_device
from workbench.errors import LayoutError
from workbench.tensors import world
from workbench.testing import run_ranks

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def data(make):
    a, b, c = make("a"), make("b"), make("a")
    a.data = b.data * 2
    (a * a).sum().backward()
    c.data = DATA["b"].clone()
    return a, a.grad, a.data, a.data.requires_grad, a.is_leaf, c


@program
def writes_through_data(make):
    """What was boxed for an earlier product is not what the tensor holds now."""
    a = make("a", False)
    found = [(a * a).sum()]
    a.data.mul_(3)
    found.append((a * a).sum())
    kept = a.data
    found.append((kept * kept).sum())
    a.mul_(2)
    found.append((kept * kept).sum())
    kept.mul_(2)
    return *found, (a * a).sum(), a


@program
def grad(make):
    a, b, c = make("a"), make("b", False), make("a")
    a.grad = b
    is_b = a.grad is a.grad
    (a * 3).sum().backward()
    before = a.grad.clone()
    a.grad.zero_()
    c.grad = DATA["b"].clone()
    (c * 3).sum().backward()
    zero, a.grad = a.grad.clone(), None
    with pytest.raises(RuntimeError, match="assign a gradient of size"):
        a.grad = torch.zeros(2, 2, dtype=torch.float64)
    del c.grad
    return is_b, before, zero, a.grad is None, c.grad is None


@program
def detaching(make):
    a = make("a")
    y = a * 2
    y.detach_()
    z = (a * 3).detach().requires_grad_()
    return y, y.requires_grad, y.is_leaf, a.is_leaf, z.is_leaf, z.requires_grad, (z * 1).is_leaf


@program
def copies_of_tensors(make):
    a = make("a")
    (a * 2).sum().backward()
    deep, shallow = copy.deepcopy(a), copy.copy(a)
    kept = copy.deepcopy([a, a.grad])
    kept = kept[0].grad is kept[1], deep.grad * 1, deep.requires_grad, deep.is_leaf, type(deep) is type(a)
    (deep * deep).sum().backward()
    with torch.no_grad():
        shallow.mul_(2)
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(a * 1)
    return kept, deep, deep.grad, a.grad, a, shallow.requires_grad


@program
def copies_of_modules(make):
    layer = Layer(make)
    layer.tied = layer.weight
    layer.register_buffer("buffer", make("v", False))
    made = copy.deepcopy(layer)
    (made(make("a")) + made.tied.sum()).sum().backward()
    flags = layer.weight.grad is None, made.weight is made.tied, isinstance(made.weight, torch.nn.Parameter)
    return made.weight.grad, flags, made.buffer, made.state_dict()["weight"]


@program
def files(make):
    a, parameter, file = make("a"), torch.nn.Parameter(make("w", False)), io.BytesIO()
    parameter.kept = "yes"
    torch.save({"a": a, "parameter": parameter, "rows": [a[0:1]]}, file)
    found = []
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        p = loaded["parameter"]
        found.append((loaded["a"], loaded["a"].requires_grad, p, isinstance(p, torch.nn.Parameter), p.kept))
        found.append(loaded["rows"][0])
    return found, pickle.loads(pickle.dumps(a))


@program
def formats(make):
    a = make("a", False)
    total = a.sum()
    return f"{total:.4f}", f"{a.mean():.2e}", "%.3f" % total, f"{total.item():.3f}"  # noqa: UP031 - that is the test


@program
def reads(make):
    a = make("a", False)
    total = a.sum()
    arrays = np.asarray(a).tolist(), a.numpy().tolist(), a.detach().cpu().numpy().sum()
    scalars = total.item(), float(total), int(total), bool(total > 0), complex(total)
    arrays = *arrays, torch.from_dlpack(a.detach()).tolist()
    return arrays, scalars, a.tolist(), a.argmax().item(), torch.is_nonzero(total), total < 5


@program
def as_a_container(make):
    a, w = make("a", False), make("w", False)
    first, *rest = w
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(a)
    identity = (
        hash(a) == hash(a),
        a in (a, w),
        len({a, w, a}),
        {a: 1}[a],
        torch.is_tensor(a),
        isinstance(a, torch.Tensor),
    )
    contained = (a[0, 0] in a), (1e9 in a), len(a), [1, 2, 3][make("s", False).long() * 0]
    return first, rest, [row * 1 for row in a], identity, contained, max(a[0]), sum(a[1]), list(map(float, a[0]))


@program
def conversions(make):
    a = make("a")
    q = a.type(torch.float32)
    made = [a.half(), a.bfloat16(), a.to("cpu"), a.cpu(), a.float(), a.double(), a.to(q), a.type_as(q), a.long()]
    made += [a.to("cpu", torch.float32), a.to(torch.float32, copy=True), a.type("torch.FloatTensor"), a.int(), a.bool()]
    (a.float().double() * q.sum()).sum().backward()
    return made, [str(tensor.dtype) for tensor in made], a.type(), a.grad


@program
def made_from_others(make):
    a = make("a")
    new = a.new_zeros(3), a.new_ones((2, 3)), a.new_full((2,), 3.5), a.new_tensor([1.0, 2.0])
    like = torch.zeros_like(a), torch.ones_like(a, dtype=torch.float32), torch.full_like(a, 2.0)
    return new, like, a.new_empty(2, 2).shape, torch.empty_like(a).shape, torch.zeros_like(a, requires_grad=True)


@program
def comparisons(make):
    a, b = make("a"), make("b")
    whole = torch.equal(a, b), torch.equal(a, a * 1), torch.allclose(a, b), torch.allclose(a, a + 1e-12), a.equal(b)
    sizes = a.is_same_size(b), a.is_same_size(make("w")), a.is_same_size(other=DATA["a"]), DATA["b"].is_same_size(a)
    return whole, sizes, torch.isclose(a, b), torch.equal(a.detach(), DATA["a"]), torch.allclose(DATA["a"], a)


@program
def functions_that_read_without_asking(make):
    a = make("a", False)
    n = a.abs().sum().long() % 5 + 2
    ranges = torch.arange(n), torch.arange(0, 20, n), torch.eye(n), torch.zeros(2, n), torch.linspace(0, 1, n)
    filled = torch.full((2,), n), torch.full_like(torch.ones(3), n), torch.ones(6).new_full((2,), n)
    converted = torch.tensor(a), torch.as_tensor(a), torch.as_tensor(a, dtype=torch.float32), torch.asarray(n)
    scalars = torch.tensor(n), torch.tensor([n, 1]), torch.scalar_tensor(n), torch.ones(2).new_tensor(n)
    drawn = torch.randperm(n).shape, torch.randint(n, (2,)).shape, list(range(n)), torch.ones(8)[:n]
    return ranges, filled, converted, scalars, drawn, torch.full((2, 2), a.sum())


@program
def plain_targets(make):
    a = make("a", False)
    copied, total = torch.zeros(5, 3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    copied.copy_(a)
    total += a.sum()
    total.add_(a.sum())
    assert type(total) is torch.Tensor and type(copied) is torch.Tensor
    rows = torch.zeros(5, 3, dtype=torch.float64)
    rows[1:3] = a[1:3]
    return copied, total, rows


@program
def plain_operands_of_global_indices(make):
    index, rows = (make("v", False).abs() * 3).long() % 5, DATA["a"].clone()
    return rows[index], rows.index_select(0, index), rows.gather(0, index[None]), torch.where(index > 2, 1, 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.filterwarnings(
    "ignore:To copy construct", "ignore:Converting a tensor with requires_grad", "ignore:torch.save or pickle"
)
def test_as_one_device(program, turn):
    assert_as_one_device(program, [*LAYOUTS, *PARTIAL][turn::4])


def test_a_shape_is_logical_in_inference_mode():
    def shapes(rank):
        x = wb.ones(5, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with torch.inference_mode():
            return [tuple(each.shape) for each in (x, x + 1, x[1:], x.data, x.to_local())]

    whole = [(5, 4), (5, 4), (4, 4), (5, 4)]
    assert run_ranks(shapes) == [[*whole, (3, 4)], [*whole, (2, 4)]]


def test_data_takes_the_layout_and_keeps_the_gradient():
    def layouts():
        placement = wb.placement.all("cpu")
        x = wb.ones(4, placement=placement, sbp="B", requires_grad=True)
        (x * 2).sum().backward()
        x.data = wb.zeros(4, placement=placement, sbp="S(0)")
        (x + 1).sum().backward()
        return str(x.sbp), str(x.grad.sbp), x.to_local().shape, x.grad.full_tensor().tolist()

    sbp, grad_sbp, shape, grad = run_ranks(layouts, 2)[0]
    assert "S(0)" in sbp and "S(0)" in grad_sbp and shape == (2,) and grad == [3.0] * 4


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=1", "*: data | zero=2"])
def test_a_parameter_keeps_its_layout_when_its_data_is_assigned(strategy):
    """Of a sum of terms an optimizer's step would be made on every term."""
    inputs = torch.linspace(0, 3, 24, dtype=torch.float64).reshape(6, 4)

    def train(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            outputs = layer(inputs)
            if number < 2:
                layer.bias.data = -outputs.mean(0)
                layer.weight.data = layer.weight.data - 0.1 * (outputs.T @ inputs).detach()
            optimizer.zero_grad()
            layer(inputs).square().mean().backward()
            optimizer.step()
        return layer.weight, layer.bias

    layers = [torch.nn.Linear(4, 4, dtype=torch.float64)]
    layers += [copy.deepcopy(layers[0]) for _ in range(2)]
    truth = [parameter.detach() for parameter in train(layers[2])]

    def program(rank):
        layer = wb.parallelize(layers[rank], strategy)
        before = layer.weight.sbp, layer.bias.sbp
        found = train(layer)
        assert tuple(parameter.sbp for parameter in found) == before
        return [parameter.full_tensor().detach() for parameter in found]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, truth)


def test_copies_keep_shared_storage():
    def shared():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        y, z = copy.deepcopy([x, x.view(4)])
        y.add_(1)
        return z.full_tensor().tolist(), x.full_tensor().tolist()

    assert run_ranks(shared, 2)[0] == ([2.0] * 4, [1.0] * 4)


def test_a_file_is_of_one_rank_of_one_world():
    def save(sbp):
        return pickle.dumps(wb.ones(5, 3, placement=wb.placement.all("cpu"), sbp=sbp))

    with pytest.warns(UserWarning, match=r"what this rank holds.*export_safetensors\(model, folder\) on all ranks"):
        files = run_ranks(lambda: save("S(0)"), 2)
    assert run_ranks(lambda rank: pickle.loads(files[rank]).sum().item(), 2) == [15.0] * 2
    with pytest.raises(LayoutError, match=r"\(5, 3\).*rank 1 of 2 saved it, this is rank 0 of 2.*full_tensor"):
        run_ranks(lambda rank: pickle.loads(files[1 - rank]) if rank == 0 else None, 2)
    with pytest.raises(LayoutError, match="this is rank 0 of 3"):
        run_ranks(lambda rank: pickle.loads(files[0]) if rank == 0 else None, 3)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | 1x2x2", "pipeline"])
def test_a_file_of_weights_that_each_rank_holds_is_read_by_any_program(strategy, tmp_path):
    built = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    path, expected = tmp_path / "weights.pt", built.state_dict()

    def save(rank):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        if rank == 0:
            torch.save([model.state_dict(), model[0].weight], path)
        wb.barrier()
        if strategy != "pipeline":
            model.load_state_dict(torch.load(path)[0])
        return [(name, value.full_tensor()) for name, value in model.state_dict().items()]

    if strategy == "pipeline":
        with pytest.warns(UserWarning, match="on some of the ranks"):
            run_ranks(save, 2)
        return
    assert_same_tensors(run_ranks(save, 4 if "1x2x2" in strategy else 2)[1], expected.items())
    weights, parameter = torch.load(path)
    assert_same_tensors(weights.items(), expected.items())
    assert type(parameter) is torch.nn.Parameter and torch.equal(parameter, expected["0.weight"])
    assert torch.load(path, weights_only=False)[1].requires_grad


def assert_same_tensors(found, expected):
    for (name, value), (expected_name, whole) in zip(found, expected, strict=True):
        assert name == expected_name and type(value) is torch.Tensor and torch.equal(value, whole)


def test_a_parallelized_module_is_copied_with_its_own_hooks():
    def outputs():
        torch.manual_seed(0)
        weights = torch.linspace(-1, 2, 32).reshape(8, 4), torch.linspace(1, -1, 16).reshape(2, 8)
        model = torch.nn.Sequential(*(torch.nn.Linear(w.shape[1], w.shape[0], bias=False) for w in weights))
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.data = weight.clone()
        plain = copy.deepcopy(model)
        wb.parallelize(model, "0: model; 1: model")
        made = copy.deepcopy(model)
        with torch.no_grad():
            model[0].weight.zero_()
        x = torch.linspace(0, 1, 12).reshape(3, 4) ** 2
        y = made(x)
        y.sum().backward()
        assert model[0].weight.grad is None and made[0].weight.grad is not None
        return torch.allclose(y.to_global(sbp="B").to_local(), plain(x)), y.sum().item() != model(x).sum().item()

    assert run_ranks(outputs, 2) == [(True, True)] * 2


def test_nothing_is_joined_by_asking():
    assert world.joined() is None or world.joined() is world.current()


@pytest.mark.parametrize(
    "form", [lambda x: x.to("meta"), lambda x: x.to(device="meta"), lambda x: x.to(dtype=x.dtype, device="meta")]
)
def test_terms_are_summed_before_they_move_to_another_device(form):
    def program():
        return str(form(wb.ones(4, 6, placement=wb.placement("cpu", ranks=[0, 1]), sbp="P")).sbp)

    assert run_ranks(program)[0] != "(P,)"


def test_a_move_to_a_device_gathers_nothing():
    def program():
        x = wb.ones(5, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with wb.debug.trace() as boxings:
            moved = [x.cpu(), x.to("cpu"), x.to("cpu", torch.float64), x.to(torch.device("cpu")), x.to(device="cpu")]
            total = x.sum(0)
            same = [y is total for y in (total.to("cpu"), total.to(total.dtype), total.to(total), total.cpu())]
            copy = x.to("cpu", copy=True)
        return [str(tensor.sbp) for tensor in (*moved, copy)], same, copy is x, str(boxings)

    assert run_ranks(program, 3)[2] == (["(S(0),)"] * 6, [True] * 4, False, "no boxings")


def test_a_stream_is_recorded_for_the_shard():
    """CPUs know no streams: torch says so of the shard itself, of which nothing was gathered."""

    def program():
        x = wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp="S(0)")
        before = world.current().traffic.num_exchanges
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            x.record_stream(torch.Stream.__new__(torch.Stream))
        return world.current().traffic.num_exchanges - before

    assert run_ranks(program, 2) == [0, 0]
