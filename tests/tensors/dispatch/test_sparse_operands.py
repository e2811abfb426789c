"""Plain sparse tensors beside global ones: the adjacency matrix of a graph network, which every rank holds."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError, LayoutError
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.testing import run_ranks

GENERATOR = torch.Generator().manual_seed(0)
DENSE = (torch.rand(5, 7, generator=GENERATOR) > 0.5).double() * torch.rand(5, 7, generator=GENERATOR).double()
FEATURES = torch.randn(7, 6, generator=GENERATOR, dtype=torch.float64)
FUNCTIONS = {
    "mm": torch.mm,
    "spmm": torch.spmm,
    "matmul": lambda a, x: a @ x,
    "sparse.mm": torch.sparse.mm,
    "mv": lambda a, x: a @ x[:, 0],
    "addmm": lambda a, x: torch.addmm(x[:5], a, x),
    "right": lambda a, x: x.t() @ a.t(),
    "times": lambda a, x: (a * x[:5, :1]).to_dense(),
}
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}


def on_ranks(values, sbp, ranks):
    placement = wb.placement("cpu", ranks=ranks)
    return wb.to_global(values.clone(), placement=placement, sbp="B").to_global(sbp=sbp).detach()


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning", "ignore:Sparse CSR")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=str)
@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)", "P"])
@pytest.mark.parametrize(("name", "kind"), [*((name, "coo") for name in list(FUNCTIONS)[:-1]), ("matmul", "csr")])
def test_values_and_gradients_are_those_of_one_device(name, kind, sbp, ranks):
    matrix, features = LAYOUTS[kind](DENSE), FEATURES.clone().requires_grad_()
    expected = FUNCTIONS[name](matrix, features)
    (expected**2).sum().backward()

    def program():
        features = on_ranks(FEATURES, sbp, ranks).requires_grad_()
        result = FUNCTIONS[name](matrix, features)
        (result**2).sum().backward()
        return result.detach().full_tensor(), features.grad.full_tensor()

    for ours in run_ranks(program, 2):
        for found, wanted in zip(ours, (expected.detach(), features.grad), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sbp", ["S(1)", "P", "B"])
def test_columns_and_terms_of_sums_stay_where_they_are(sbp):
    def program():
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            result = torch.sparse.mm(DENSE.to_sparse(), on_ranks(FEATURES, sbp, [0, 1]))
        return str(result.sbp[0]), result.shape

    for found, shape in run_ranks(program, 2):
        assert (found, shape) == (sbp, (5, 6))


def test_the_result_has_the_rows_of_its_own_sparse_operand_on_all_ranks():
    def program():
        features = on_ranks(FEATURES, "B", [1])
        return [tuple((DENSE[:rows].to_sparse() @ features).shape) for rows in (5, 3)]

    assert run_ranks(program, 2) == [[(5, 6), (3, 6)]] * 2


ADJACENCY = (DENSE.t() @ DENSE).to_sparse()


class GraphNet(nn.Module):
    """Two layers of a graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loops", torch.eye(7, dtype=torch.float64).to_sparse(), persistent=False)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        """Features (nodes, 6), adjacency (nodes, nodes) -> scores (nodes, 3)."""
        hidden = torch.relu(torch.spmm(adjacency, self.first(features)))
        return self.second(adjacency @ hidden + torch.sparse.mm(self.loops, hidden))


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize(
    "strategy", ["*: data", "*: model", "pipeline", "*: data | zero=3", "*: data | offload=activations recompute"]
)
def test_a_graph_network_trains_as_on_one_device(strategy, tmp_path):
    torch.manual_seed(0)
    net = GraphNet().double()
    labels, known = torch.arange(7) % 3, torch.tensor([0, 2, 3, 6])

    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(FEATURES, ADJACENCY)[known], labels[known])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def program():
        model = wb.parallelize(copy.deepcopy(net), strategy)
        found = losses(model)
        wb.checkpoint.save(tmp_path / "checkpoint", model=model)
        other = wb.parallelize(copy.deepcopy(net), "*: data")
        wb.checkpoint.load(tmp_path / "checkpoint", model=other)
        return found + losses(other)

    whole = copy.deepcopy(net)
    expected = losses(whole) + losses(whole)
    for found in run_ranks(program, 2):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_what_cannot_be_is_refused(tmp_path):
    built = nn.Linear(2, 2).double()
    built.register_buffer("graph", DENSE.to_sparse())

    def program():
        x, matrix = on_ranks(FEATURES, "S(0)", [0, 1]), DENSE.to_sparse()
        with pytest.raises(LayoutError, match=r"a sparse tensor .* requires a gradient.*to_dense"):
            matrix.clone().requires_grad_() @ x
        with pytest.raises(LayoutError, match=r"to_sparse: .* is sparse; global tensors are strided.*full_tensor"):
            x.to_sparse()
        with pytest.raises(LayoutError, match=r"wb.to_global: .* torch.sparse_coo.*stays plain"):
            wb.to_global(matrix, placement=wb.placement.all(), sbp="B")

        model = copy.deepcopy(built)
        with pytest.raises(CheckpointError, match=r"model.graph is a torch.sparse_coo tensor .*persistent=False"):
            wb.checkpoint.save(tmp_path / "checkpoint", model=wb.parallelize(model, "*: data"))

    run_ranks(program, 2)
