"""Whole layers of torch.nn, unmodified, on global tensors: attention, transformers, recurrent layers."""

import itertools
import warnings

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.tensors.dispatch import fallback
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.global_tensor import GlobalTensor
from workbench.testing import run_ranks


def globalize(module, placement, layouts):
    """Every parameter as a global one; ``layouts`` maps ends of names to an sbp, the others are broadcast."""
    whole = ["B"] * placement.num_axes
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full_name = f"{type(owner).__name__}.{name}"
            sbp = next((sbp for end, sbp in layouts.items() if full_name.endswith(end)), whole)
            made = nn.Parameter(wb.to_global(parameter.data, placement=placement, sbp=whole).to_global(sbp=sbp))
            made._is_param = True
            setattr(owner, name, made)
    return module


def everything(module, call, inputs):
    """Results of a call and of its backward: outputs, gradients of inputs, gradients of parameters."""
    outputs = call(module, *inputs)
    flat = [t for t in outputs if t is not None] if isinstance(outputs, tuple) else [outputs]
    sum((out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum() for out in flat).backward()
    return [*flat, *(t.grad for t in inputs), *(p.grad for p in module.parameters())]


def assert_like_one_device(make, call, shapes, input_sbp, layouts=None, grid=(0, 1), allow_fallback=False):
    torch.manual_seed(0)
    module = make()
    inputs = [torch.randn(shape) for shape in shapes]
    truth = everything(module, call, [x.clone().requires_grad_() for x in inputs])
    fallback._warned.clear()

    def program():
        p = wb.placement("cpu", ranks=torch.tensor(grid).tolist())
        copy = make()
        copy.load_state_dict(module.state_dict())
        globalize(copy, p, layouts or {})
        entered = [wb.to_global(x, placement=p, sbp=["B"] * p.num_axes) for x in inputs]
        leaves = [x.to_global(sbp=sbp).requires_grad_() for x, sbp in zip(entered, input_sbp, strict=True)]
        found = everything(copy, call, leaves)
        assert all(isinstance(t, GlobalTensor) for t in found)
        return [t.detach().full_tensor() for t in found]

    with warnings.catch_warnings():
        if allow_fallback:
            warnings.simplefilter("ignore", FallbackWarning)
        found = run_ranks(program, torch.tensor(grid).numel())
    for values, (value, expected) in itertools.product(found, zip(found[0], truth, strict=True)):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-4, atol=1e-5)
        assert len(values) == len(truth)


MASK = torch.ones(3, 3, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False, False, True], [False] * 3, [False, False, True], [False] * 3, [False] * 3])
HEADS_SPLIT = {
    "MultiheadAttention.in_proj_weight": "S(0)",
    "MultiheadAttention.in_proj_bias": "S(0)",
    "NonDynamicallyQuantizableLinear.weight": "S(1)",
}
ATTENTION = {
    "weights": (lambda: nn.MultiheadAttention(8, 4, batch_first=True), lambda m, x: m(x, x, x)),
    "no weights": (
        lambda: nn.MultiheadAttention(8, 4, batch_first=True),
        lambda m, x: m(x, x, x, attn_mask=MASK, need_weights=False)[0],
    ),
    "padding": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
        lambda m, x: m(x, x, x, key_padding_mask=PADDING, attn_mask=MASK, average_attn_weights=False),
    ),
    "zero and bias_kv": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        lambda m, x: m(x, x, x),
    ),
    "sizes": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True),
        lambda m, x: m(x, x[..., :6], x[..., :5], need_weights=False)[0],
    ),
}
GRID = ((0, 1), (2, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("sbp", "layouts", "grid"), [("S(0)", {}, (0, 1, 2)), ("B", HEADS_SPLIT, (0, 1))])
def test_multi_head_attention(name, sbp, layouts, grid):
    make, call = ATTENTION[name]
    assert_like_one_device(make, call, [(5, 3, 8)], [sbp], layouts, grid)


def test_multi_head_attention_with_batch_and_heads_split():
    layouts = {name: ["B", sbp] for name, sbp in HEADS_SPLIT.items()}
    assert_like_one_device(*ATTENTION["no weights"], [(5, 3, 8)], [["S(0)", "B"]], layouts, GRID)


def test_a_split_batch_stays_where_it_is():
    module = _encoder()

    def program():
        p = wb.placement.all("cpu")
        copy = _encoder()
        copy.load_state_dict(module.state_dict())
        globalize(copy, p, {})
        x = wb.randn(6, 3, 8, placement=p, sbp="S(0)")
        with wb.debug.trace() as boxings:
            out = copy(x)
        return str(out.sbp), str(boxings)

    assert run_ranks(program, 2)[0] == ("(S(0),)", "no boxings")


@pytest.mark.parametrize(
    ("channels", "groups", "sbp", "layout", "grid"),
    [
        ((9, 6), 3, "B", "S(0)", (0, 1)),  # the second group is cut
        ((9, 6), 3, "S(1)", "S(0)", (0, 1)),
        ((4, 10), 2, "S(1)", "S(0)", (0, 1, 2)),  # a rank has a part of one group, or parts of two
        ((6, 12), 6, "S(1)", "S(0)", (0, 1)),  # whole groups
        ((6, 12), 2, ["S(0)", "S(1)"], ["B", "S(0)"], GRID),
        ((6, 12), 3, ["B", "S(1)"], ["S(0)", "S(0)"], GRID),
    ],
)
def test_a_convolution_in_groups_splits_its_channels(channels, groups, sbp, layout, grid):
    """Also where a slice cuts a group: no weight is gathered."""
    make = lambda: nn.Conv2d(*channels, 3, padding=1, groups=groups)  # noqa: E731
    call = lambda module, x: module(x)  # noqa: E731
    assert_like_one_device(make, call, [(4, channels[0], 4, 3)], [sbp], {".weight": layout, ".bias": layout}, grid)


def _encoder(enable_nested_tensor=False, **options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor)


FEED_FORWARD_SPLIT = {"Linear.weight": "S(0)", "Linear.bias": "S(0)"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_transformer_encoder(training, sbp):
    layouts = {} if sbp == "S(0)" else HEADS_SPLIT | {"linear1.weight": "S(0)"}

    def call(module, x):
        return module.train(training)(x, mask=MASK, is_causal=True)

    assert_like_one_device(lambda: _encoder(norm_first=sbp == "B"), call, [(5, 3, 8)], [sbp], layouts)


@pytest.mark.parametrize("is_nested", [False, True])
def test_transformer_encoder_without_gradient_takes_no_fast_path_past_us(is_nested):
    """No mask is read either, by which torch decides whether it makes a nested tensor, without padding."""
    module = _encoder().eval()
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        expected = module(x, src_key_padding_mask=PADDING)
    fallback._warned.clear()

    def program():
        p = wb.placement.all("cpu")
        copy = _encoder(enable_nested_tensor=is_nested).eval()
        copy.load_state_dict(module.state_dict())
        globalize(copy, p, {})
        with torch.no_grad():
            return copy(
                wb.to_global(x, placement=p, sbp="B").to_global(sbp="S(0)"), src_key_padding_mask=PADDING
            ).full_tensor()

    torch.testing.assert_close(run_ranks(program, 2)[1], expected)


def test_transformer():
    def make():
        return nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)

    def call(module, source, target):
        return module(source, target, tgt_mask=MASK)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_like_one_device(make, call, [(5, 4, 8), (5, 3, 8)], ["S(0)", "S(0)"])


RECURRENT = {
    "rnn": lambda: nn.RNN(4, 3, 2),
    "lstm": lambda: nn.LSTM(4, 3, 2, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(4, 3, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(4, 3, 2, bias=False),
}


def _flat(module, x):
    out, state = module(x)
    return (out, *state) if isinstance(state, tuple) else (out, state)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layers_split_their_batch(name):
    shape, sbp = ((5, 3, 4), "S(0)") if name == "lstm projected" else ((3, 5, 4), "S(1)")
    assert_like_one_device(RECURRENT[name], _flat, [shape], [sbp], grid=(0, 1, 2))


def test_recurrent_layers_with_split_weights_or_steps_gather_them():
    layouts = {"weight_ih_l0": "S(0)", "weight_hh_l1": "S(1)"}
    assert_like_one_device(RECURRENT["lstm"], _flat, [(3, 2, 4)], ["S(0)"], layouts, allow_fallback=True)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells(cell):
    def call(module, x):
        out = module(x)
        return out if isinstance(out, torch.Tensor) else tuple(out)

    assert_like_one_device(lambda: cell(4, 3), call, [(5, 4)], ["S(0)"], grid=(0, 1, 2))


def test_packed_sequences():
    def call(module, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2, 1], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)[0]

    assert_like_one_device(
        lambda: nn.GRU(4, 3, batch_first=True), call, [(3, 3, 4)], ["S(0)"], allow_fallback=True
    )  # fmt: skip


def test_an_index_that_no_rank_has_is_an_error():
    def program():
        p = wb.placement.all("cpu")
        table = wb.randn(5, 3, placement=p, sbp="S(0)")
        return nn.functional.embedding(wb.tensor([1, 5], placement=p, sbp="B"), table)

    with pytest.raises(IndexError, match="index 5 is out of range for a table of 5 rows"):
        run_ranks(program, 2)


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("function", [nn.functional.embedding, nn.functional.embedding_bag])
@pytest.mark.parametrize("sbp", ["B", "S(0)", "S(1)"])
def test_rows_in_use_are_scaled_in_the_table(function, sbp):
    ids, rows = torch.tensor([[0, 3], [4, 3]]), torch.arange(20.0).view(5, 4)
    scaled = rows.clone()
    expected = [function(ids, scaled, max_norm=2.0), scaled]

    def program():
        table = wb.tensor(rows, placement=wb.placement.all(), sbp=sbp)
        return [part.full_tensor() for part in (function(ids, table, max_norm=2.0), table)]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("table", ["B", "S(0)", "S(1)"])
def test_tables_with_sparse_gradients_have_dense_ones(layer, table):
    """A rank's sparse gradient could be neither summed nor cut; the numbers are those of one device."""
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (6, 3))
    module = layer(9, 4, padding_idx=2, sparse=True)
    module(ids).square().sum().backward()

    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        copy = layer(9, 4, padding_idx=2, sparse=True)
        copy.load_state_dict(module.state_dict())
        globalize(copy, p, {"weight": table})
        copy(wb.to_global(ids, placement=p, sbp="B").to_global(sbp="S(0)")).square().sum().backward()
        return copy.weight.grad.full_tensor()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, module.weight.grad.to_dense())


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
def test_a_bag_of_torch_takes_its_table_first(sbp):
    table, words, begins = torch.randn(7, 4), torch.arange(9) % 7, torch.tensor([0, 2, 2, 7])
    expected = torch.embedding_bag(table, words, begins)[0]

    def program():
        place = lambda t, s: wb.to_global(t.clone(), placement=wb.placement.all("cpu"), sbp="B").to_global(sbp=s)  # noqa: E731
        return torch.embedding_bag(place(table, "B"), place(words, sbp), place(begins, "B"))[0].full_tensor()

    for found in run_ranks(program):
        torch.testing.assert_close(found, expected)
