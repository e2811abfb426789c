"""Terms of a cross entropy over a slice of the classes, in one pass over the logits forward and one backward.

Each rank of a split class dim calls ``cross_entropy_terms`` on its slice. The ranks combine three small results: the
log of the sum of exponentials, the logit at the target (zero where another rank holds it) and the sum of the logits.
The loss, with label smoothing ``e`` over ``C`` classes and a z-loss weight ``z``, is then

    lse - (1 - e) picked - e / C total + z lse^2

and its gradient flows back through the same three numbers per row: neither softmax nor one-hot targets are ever stored.
(The vocabulary-parallel loss of Shoeybi et al., arXiv 1909.08053.)
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.kernels.launch import accumulator, can_launch

Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("workbench::cross_entropy_terms", mutates_args=())
def cross_entropy_terms(logits: torch.Tensor, target: torch.Tensor, first: int) -> Terms:
    """Per row: log of the sum of exponentials, the logit at the target, and the sum of the logits.

    Args:
        logits: (rows, classes of this slice), floating.
        target: (rows,), int64, class numbers of the full class dim; a target outside the slice gives 0.
        first: number of the slice's first class.

    Returns:
        Three tensors (rows,) of at least 32 bits. For an empty slice they are minus infinity, 0 and 0.

    >>> lse, picked, total = cross_entropy_terms(torch.tensor([[1.0, 2.0]]), torch.tensor([3]), 2)
    >>> picked.item(), total.item()
    (2.0, 3.0)
    """
    if can_launch(logits):
        from workbench.kernels.cross_entropy_terms_triton import forward

        return forward(logits, target, first)
    return cross_entropy_terms_reference(logits, target, first)


@cross_entropy_terms.register_fake
def _(logits: torch.Tensor, *_: Any) -> Terms:
    lse, picked, total = (logits.new_empty(logits.shape[:1], dtype=accumulator(logits.dtype)) for _ in range(3))
    return lse, picked, total


@torch.library.custom_op("workbench::cross_entropy_terms_backward", mutates_args=())
def cross_entropy_terms_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    first: int,
    lse: torch.Tensor,
    grad_lse: torch.Tensor,
    grad_picked: torch.Tensor,
    grad_total: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the logits: softmax times ``grad_lse``, plus ``grad_picked`` at the target, plus ``grad_total``."""
    if can_launch(logits):
        from workbench.kernels.cross_entropy_terms_triton import backward

        return backward(logits, target, first, lse, (grad_lse, grad_picked, grad_total))
    return cross_entropy_terms_backward_reference(logits, target, first, lse, (grad_lse, grad_picked, grad_total))


@cross_entropy_terms_backward.register_fake
def _(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: Terms) -> None:
    logits, target, ctx.first = inputs
    ctx.save_for_backward(logits, target, output[0])


def _differentiate(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    logits, target, lse = ctx.saved_tensors
    if torch.is_grad_enabled():  # torch can differentiate the reference again
        return cross_entropy_terms_backward_reference(logits, target, ctx.first, lse, grads), None, None  # type: ignore[arg-type]
    return cross_entropy_terms_backward(logits, target, ctx.first, lse, *grads), None, None


cross_entropy_terms.register_autograd(_differentiate, setup_context=_save)


def cross_entropy_terms_reference(logits: torch.Tensor, target: torch.Tensor, first: int) -> Terms:
    """``cross_entropy_terms`` in torch."""
    wide = logits.to(accumulator(logits.dtype))
    place, inside = _places(logits, target, first)
    if logits.shape[1] == 0:
        return wide.new_full(target.shape, -torch.inf), wide.new_zeros(target.shape), wide.new_zeros(target.shape)
    picked = wide.gather(1, place[:, None])[:, 0].where(inside, 0.0)
    return torch.logsumexp(wide, 1), picked, wide.sum(1)


def cross_entropy_terms_backward_reference(
    logits: torch.Tensor, target: torch.Tensor, first: int, lse: torch.Tensor, grads: Terms
) -> torch.Tensor:
    """``cross_entropy_terms_backward`` in torch."""
    if logits.shape[1] == 0:
        return torch.empty_like(logits)
    place, inside = _places(logits, target, first)
    result = torch.exp(logits.to(lse.dtype) - lse[:, None]) * grads[0][:, None] + grads[2][:, None]
    result.scatter_add_(1, place[:, None], grads[1].where(inside, 0.0)[:, None])
    return result.to(logits.dtype)


def _places(logits: torch.Tensor, target: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target (zero if it is outside the slice), and whether it is inside."""
    place = target - first
    inside = (place >= 0) & (place < logits.shape[1])
    return place.where(inside, 0), inside
