"""``flex_attention`` on global tensors against torch's on one device: results, gradients, tensors that functions read.

torch refuses gradients on a CPU, where its operator has them all the same: the tests pass its check.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import workbench as wb
from workbench.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch's compiler reads it
]
NUM_SAMPLES, NUM_HEADS, LENGTH, WIDTH = 4, 4, 256, 16
DOCUMENTS = (torch.arange(LENGTH) // 50).repeat(NUM_SAMPLES, 1) + torch.arange(NUM_SAMPLES)[:, None] % 2
SLOPES = torch.linspace(0.1, 0.5, NUM_HEADS)
_UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""With it, torch's function calls its operator itself. On one device it must not, for gradients of captured tensors."""
_together = threading.Lock()
"""torch's compiler is no place for two threads."""


@pytest.fixture(autouse=True)
def with_gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, _UNCOMPILED, True)


def causal(sample: Any, head: Any, row: Any, column: Any) -> Any:
    return row >= column


def window(sample: Any, head: Any, row: Any, column: Any) -> Any:
    return (row >= column) & (row - column < 100 + 20 * head + 10 * sample)


def softcap(score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
    return 2 * torch.tanh(score / 2) + 0.001 * (row - column) * (head + 1)


def block_mask(mask_mod: Callable[..., Any], **sizes: Any) -> Any:
    return create_block_mask(mask_mod, sizes.get("B"), sizes.get("H"), LENGTH, LENGTH, device="cpu")


def random_operands(key_heads: int = NUM_HEADS, samples: int = NUM_SAMPLES, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = NUM_HEADS, key_heads, key_heads, NUM_HEADS
    return [torch.randn(samples, n, length, WIDTH, generator=generator) for n in heads]


Attend = Callable[..., Any]


def plain(attend: Attend, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and all gradients on one device."""
    *operands, grad = tensors
    leaves = [x.clone().requires_grad_() for x in (*operands, *others)]
    with on_one_device():
        out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@contextmanager
def on_one_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_module, _UNCOMPILED, False)
        yield


def assert_as_one_device(
    attend: Attend, sbp: str, tensors: list[torch.Tensor], others: list[torch.Tensor] = [],  # noqa: B006 - only read
    size: int = 2, out_sbp: str | None = None,
) -> None:  # fmt: skip
    """All ranks get the numbers of one device, and the layout stays."""
    expected = plain(attend, tensors, others)

    def program() -> Any:
        p = wb.placement(ranks=list(range(size)))

        def to_global(x: torch.Tensor, to: str) -> Any:
            whole = wb.to_global(x, placement=p, sbp="B")
            return (whole / size).to_global(sbp="P") if to == "P*" else whole.to_global(sbp=to)

        *operands, grad = (to_global(x, sbp).detach() for x in tensors)
        leaves = [x.requires_grad_() for x in (*operands, *(to_global(x, "B").detach() for x in others))]
        out = attend(*leaves)
        found = [out, *torch.autograd.grad(out, leaves, grad)]
        return str(out.sbp), [x.full_tensor().detach() for x in found]

    for layout, found in run_ranks(program, size):
        assert layout == f"({out_sbp or sbp},)"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(8, start=2)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "S(2)", "B"])
@pytest.mark.parametrize(
    ("mask_mod", "sizes"),
    [(causal, {}), (window, {"B": NUM_SAMPLES, "H": NUM_HEADS})],
    ids=["one mask for all", "a mask for each sample and head"],
)
def test_masks_and_scores_see_logical_positions(sbp: str, mask_mod: Any, sizes: dict[str, int]) -> None:
    mask = block_mask(mask_mod, **sizes)
    assert_as_one_device(
        lambda q, k, v: flex_attention(q, k, v, score_mod=softcap, block_mask=mask), sbp, random_operands()
    )


def test_rows_are_split_where_heads_do_not_suffice() -> None:
    """Two ranks, one head of keys: each has its rows, and all keys."""
    mask, attended = block_mask(window, H=NUM_HEADS, B=NUM_SAMPLES), random_operands(key_heads=1)
    attend = functools.partial(flex_attention, block_mask=mask, enable_gqa=True)
    assert_as_one_device(attend, "S(2)", attended)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_of_queries_go_with_their_heads_of_keys(key_heads: int) -> None:
    attend = functools.partial(flex_attention, score_mod=softcap, enable_gqa=True)
    assert_as_one_device(attend, "S(1)", random_operands(key_heads))


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize(
    ("sbp", "samples", "length", "size"), [("S(1)", 4, 32, 3), ("S(0)", 1, 32, 2), ("S(2)", 4, 33, 3)]
)
def test_slices_may_be_uneven_or_empty(sbp: str, samples: int, length: int, size: int) -> None:
    assert_as_one_device(
        functools.partial(flex_attention, score_mod=softcap),
        sbp,
        random_operands(samples=samples, length=length),
        size=size,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_a_tensor_that_scores_read_gets_its_gradient(sbp: str) -> None:
    bias = torch.randn(NUM_HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(1))

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        def relative(score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
            return score + bias[head, row - column + LENGTH]

        return flex_attention(q, k, v, score_mod=relative)

    assert_as_one_device(attend, sbp, random_operands(), [bias])


class Attention(nn.Module):
    """Queries, keys and values of a word's vector; scores fall with the distance, and documents see themselves only."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(NUM_HEADS * WIDTH, 3 * NUM_HEADS * WIDTH)
        self.out = nn.Linear(NUM_HEADS * WIDTH, NUM_HEADS * WIDTH)
        self.register_buffer("slopes", SLOPES)
        self.strength = nn.Parameter(torch.ones(NUM_HEADS))

    def fall(self, score: Any, sample: Any, head: Any, row: Any, column: Any) -> Any:
        return score - self.strength[head] * self.slopes[head] * (row - column)

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        def is_seen(sample: Any, head: Any, row: Any, column: Any) -> Any:
            return (row >= column) & (documents[sample, row] == documents[sample, column])

        mask = create_block_mask(is_seen, len(x), None, LENGTH, LENGTH, device=x.device)
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = flex_attention(q, k, v, score_mod=self.fall, block_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


def assert_trains_as_one_device(strategy: str, device: str, tolerance: float) -> None:
    torch.manual_seed(0)
    built, x = Attention().to(device), torch.randn(NUM_SAMPLES, LENGTH, NUM_HEADS * WIDTH, device=device)
    state, documents = {name: value.clone() for name, value in built.state_dict().items()}, DOCUMENTS.to(device)
    with on_one_device():
        built(x, documents).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in built.named_parameters()}

    def program() -> dict[str, torch.Tensor]:
        with _together:
            model = Attention().to(device)
            model.load_state_dict(state)
        model = wb.parallelize(model, strategy)
        model(x, documents).square().mean().backward()
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    for found in run_ranks(program, 2, device=device):
        torch.testing.assert_close(found, expected, rtol=100 * tolerance, atol=tolerance)


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data; out: data@1 | 2x1x1"])
def test_a_model_that_packs_documents_trains_as_one_device_does(strategy: str) -> None:
    assert_trains_as_one_device(strategy, "cpu", tolerance=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["*: data", "*: model"])
def test_its_kernel_for_gpus_trains_as_its_operator_does(strategy: str) -> None:
    assert_trains_as_one_device(strategy, "cuda", tolerance=1e-4)


def test_a_function_that_was_compiled_before_is_split_too() -> None:
    compiled, (q, k, v, _) = torch.compile(flex_attention, backend="eager"), random_operands(length=32)
    expected = flex_attention(q, k, v, score_mod=softcap)

    def program() -> Any:
        p = wb.placement(ranks=[0, 1])
        parts = [wb.to_global(x, placement=p, sbp="B").to_global(sbp="S(0)") for x in (q, k, v)]
        with _together, torch.no_grad():
            out = compiled(*parts, score_mod=softcap)
        return str(out.sbp), out.full_tensor()

    for sbp, found in run_ranks(program, 2):
        assert sbp == "(S(0),)"
        torch.testing.assert_close(found, expected)


def test_sums_of_exponentials_have_the_layout_of_the_heads() -> None:
    q, k, v, _ = random_operands()
    _, expected = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))

    def program() -> Any:
        p = wb.placement(ranks=[0, 1])
        parts = [wb.to_global(x, placement=p, sbp="B").to_global(sbp="S(1)") for x in (q, k, v)]
        _, found = flex_attention(*parts, return_aux=AuxRequest(lse=True))
        return str(found.lse.sbp), found.lse.full_tensor()

    for sbp, lse in run_ranks(program, 2):
        assert sbp == "(S(1),)"
        torch.testing.assert_close(lse, expected.lse)
