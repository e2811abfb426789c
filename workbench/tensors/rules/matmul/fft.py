"""Fourier transforms: the transformed dims stay whole."""

from __future__ import annotations

from collections.abc import Collection
from string import ascii_lowercase

from workbench.tensors.dispatch.equation_text import elementwise_except, normalize_dims
from workbench.tensors.dispatch.registry import Call, Resolution, rule


def _transform(ndim: int, dims: Collection[int]) -> Resolution:
    """Transformed dims stay whole, and every rank needs a row: the FFT library refuses some empty shards."""
    return Resolution(elementwise_except(ndim, dims), filled=ascii_lowercase)


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def _along_one_dim(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return _transform(ndim, normalize_dims(call.arg(2, "dim", -1), ndim))


@rule("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2")
def _along_two_dims(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return _transform(ndim, normalize_dims(call.arg(2, "dim", (-2, -1)), ndim))


@rule("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn")
def _along_dims(call: Call) -> Resolution:
    """The transformed dims. Default: the last ones, as many as there are sizes; all without sizes."""
    ndim = len(call.shapes[0])
    dims, sizes = call.arg(2, "dim"), call.arg(1, "s")
    if dims is None and sizes is not None:
        dims = range(ndim - (1 if isinstance(sizes, int) else len(sizes)), ndim)
    return _transform(ndim, normalize_dims(dims, ndim))


@rule("fft_fftshift", "fft_ifftshift")
def _shift(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, normalize_dims(call.arg(1, "dim"), ndim), addend=True))


@rule("stft")
def _stft(call: Call) -> Resolution:
    """A batch of signals may be split; all share the window."""
    batch = "n" * (len(call.shapes[0]) - 1)
    rest = "XYZ"[: len(call.outputs[0][0]) - len(batch)]
    return Resolution(f"{batch}T{', W' * (len(call.operands) - 1)} -> {batch}{rest}", filled="n")
