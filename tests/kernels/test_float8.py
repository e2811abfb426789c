"""Products of 8 bits: emulated as torch's own product on CPUs, scales, gradients, and which device takes which."""

import itertools

import pytest
import torch

from workbench.kernels import float8
from workbench.kernels.float8 import (
    E4M3,
    E5M2,
    emulated_product,
    float8_linear,
    lacks_float8,
    largest,
    product_for,
    quantize,
    scale_of,
    scaled_product,
)


def in_8_bits(shape, dtype, seed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    scale = scale_of(largest(x), dtype)
    return quantize(x, scale, dtype), scale


@pytest.mark.parametrize("shape", [(32, 64, 48), (17, 16, 32), (3, 32, 16), (5, 30, 7), (128, 256, 64)], ids=str)
@pytest.mark.parametrize("dtypes", [*itertools.product((E4M3, E5M2), repeat=2)], ids=str)
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16], ids=str)
def test_emulation_has_the_bits_of_torchs_own_product(shape, dtypes, result):
    m, k, n = shape
    (a, a_scale), (b, b_scale) = in_8_bits((m, k), dtypes[0], 0), in_8_bits((n, k), dtypes[1], 1)
    found = emulated_product(a, a_scale, b.t(), b_scale, result)
    wanted = torch._scaled_mm(a, b.t(), a_scale.reciprocal(), b_scale.reciprocal(), out_dtype=result)
    assert found.dtype == result and torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 30, 7), (0, 16, 16), (16, 0, 16)], ids=str)
def test_padding_for_gpus_changes_no_number(shape):
    """The zeros may be summed in another order, so the last bit may differ."""
    m, k, n = shape
    a, scale = torch.ones(m, k).to(E4M3), torch.tensor(2.0)
    a[:, ::3] = torch.tensor(3.0).to(E4M3)
    b = torch.arange(n * k).reshape(n, k).remainder(13).float().to(E4M3)
    found = scaled_product(a, scale, b.t(), scale, torch.float32)
    assert torch.equal(found, emulated_product(a, scale, b.t(), scale, torch.float32))


def test_the_largest_value_becomes_the_largest_number():
    x = torch.tensor([[0.1, -3.0], [2.0, 1e-9]])
    for dtype, most in ((E4M3, 448.0), (E5M2, 57344.0)):
        scale = scale_of(largest(x), dtype)
        assert quantize(x, scale, dtype).float().abs().max() == most
    zeros = torch.zeros(2, 2)
    assert torch.equal(quantize(zeros, scale_of(largest(zeros), E4M3), E4M3).float(), zeros)
    assert largest(torch.empty(0, 3)) == 0


def test_what_is_not_finite_stays_so():
    for value in (float("inf"), float("nan")):
        x, weight = torch.tensor([[1.0, value]]), torch.ones(2, 2)
        amaxes = torch.stack([largest(x), largest(weight)])
        assert not float8_linear(x, weight, amaxes).isfinite().any()


def test_three_products_of_rounded_operands():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 32, generator=generator).requires_grad_()
    weight = torch.randn(16, 32, generator=generator).requires_grad_()
    grad = torch.randn(2, 5, 16, generator=generator)
    found = float8_linear(x, weight, torch.stack([largest(x.detach()), largest(weight.detach())]))
    found.backward(grad)

    def rounded(tensor, dtype):
        scale = scale_of(largest(tensor), dtype)
        return quantize(tensor, scale, dtype).float() * scale.reciprocal()

    xs, ws, gs = rounded(x.detach(), E4M3), rounded(weight.detach(), E4M3), rounded(grad, E5M2)
    assert torch.equal(found, (xs.flatten(0, 1) @ ws.t().contiguous()).view(2, 5, 16))
    assert torch.equal(x.grad, (gs.flatten(0, 1) @ ws).view(2, 5, 32))
    assert torch.equal(weight.grad, gs.flatten(0, 1).t().contiguous() @ xs.flatten(0, 1))
    assert 0.001 < (found - x @ weight.t()).abs().max() < 1  # it is no product of 32 bits


def test_gpus_from_89_on_multiply_8_bits(monkeypatch):
    assert product_for(torch.device("cpu")) is emulated_product
    assert product_for(torch.device("cuda", 1)) is scaled_product
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, fits in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
        lacking = lacks_float8(torch.device("cuda", 1))
        assert bool(lacking) != fits
        if not fits:
            words = "cuda:1", "NVIDIA A100", f"{capability[0]}.{capability[1]}", "8.9"
            assert all(word in lacking for word in words)
    assert "8.9" in lacks_float8(torch.device("xpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in lacks_float8(torch.device("cuda"))


def test_a_device_that_multiplies_8_bits_gets_all_three_products(monkeypatch):
    calls = []

    def multiply(*args):
        calls.append(args[0].dtype)
        return scaled_product(*args)

    monkeypatch.setattr(float8, "product_for", lambda device: multiply)
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    float8_linear(x, weight, torch.stack([largest(x.detach()), largest(weight.detach())])).sum().backward()
    assert calls == [E4M3, E5M2, E5M2]
