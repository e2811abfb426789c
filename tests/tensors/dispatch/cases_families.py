"""Cases of the sweep: linear algebra, Fourier transforms, complex numbers, special functions, look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case


def _grams(generator: torch.Generator) -> list[torch.Tensor]:
    factors = torch.randn(5, 3, 3, generator=generator)
    return [factors @ factors.mT + torch.eye(3), torch.randn(5, 3, 4, generator=generator)]


def _sorted_rows(generator: torch.Generator) -> list[torch.Tensor]:
    rows = torch.rand(4, 5, generator=generator).sort(1).values
    return [rows, torch.rand(4, 3, generator=generator)]


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.fft.rfft2(x, dim=(0, 2)))


def _complex(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, y) * torch.polar(x, y).conj()
    return z.real + z.imag * z.abs()


def _factors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    lower = torch.linalg.cholesky(a)
    return torch.cholesky_solve(b, lower) + torch.linalg.slogdet(a).logabsdet[:, None, None]


def _found(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    places = torch.searchsorted(rows.detach(), values.detach())
    return places + torch.bucketize(values.detach(), torch.linspace(0, 1, 4))


CASES = [
    Case("vander", torch.linalg.vander, ((5,),)),
    Case("householder product", torch.linalg.householder_product, ((2, 4, 3), (2, 3))),
    Case("eigenvalues of a batch", lambda a, b: torch.linalg.eigvalsh(a), (), _grams),
    Case("solve column by column", lambda a, b: torch.linalg.solve(a, b), (), _grams),
    Case("cholesky factors", _factors, (), _grams),
    Case("qr of a batch", lambda a, b: torch.linalg.qr(a).R.abs() + torch.linalg.inv(a), (), _grams),
    Case("rfft2", _spectrum, ((5, 4, 6),)),
    Case("complex numbers", _complex, ((5, 4), (5, 4))),
    Case("special functions", lambda x: torch.special.entr(x.sigmoid()) + torch.special.i0e(x), ((5, 4),)),
    Case("polynomials", lambda x: torch.special.chebyshev_polynomial_t(x.detach(), 3), ((5, 4),)),
    Case("searchsorted", _found, (), _sorted_rows),
    Case("trapezoid", lambda y, x: torch.trapezoid(y, x, dim=1), ((5, 4), (4,))),
    Case("renorm", lambda x: torch.renorm(x, 2, 1, 0.5), ((5, 4),)),
    Case("glu and prelu", lambda x, w: F.prelu(F.glu(x, 1), w), ((5, 6), (3,))),
    Case("meshgrid", lambda x, y: sum(torch.meshgrid(x, y, indexing="xy")), ((5,), (3,))),
    Case("boolean mask", lambda x: x[x.detach() > 0] * 2, ((5, 4),)),
    Case("unique of what is positive", lambda x: torch.unique((x.detach() * 2).round(), sorted=True), ((5, 4),)),
    Case("alpha from a value", lambda x, y: torch.add(x, y, alpha=y.detach().max().item()), ((5, 4), (4,))),
]
