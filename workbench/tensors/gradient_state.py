"""What a global tensor keeps of its gradient beside torch's ``.grad``."""

from __future__ import annotations

from typing import Any, NoReturn


class GradientState:
    """The gradient of one tensor, as far as autograd does not hold it itself.

    Attributes:
        placeholder: on a placeholder, False while the owner has no gradient, then True; the placeholder of the
            gradient, once somebody has read it.
        reusable: the placeholder of the last step's gradient, whose memory the next one takes.
        shard: under ZeRO 2 and 3, this rank's shard of the summed gradient, which takes the place of ``.grad``.
        shard_spec: on a placeholder whose owner keeps shards: the spec of the tensor, and the spec of its shards.
        sum: the sum of the terms of ``.grad`` over ranks, with what it holds for (see ``training.gradients``).
    """

    __slots__ = ("placeholder", "reusable", "shard", "shard_spec", "sum")

    def __init__(self) -> None:
        self.placeholder: Any = False
        self.reusable: Any = None
        self.shard: Any = None
        self.shard_spec: tuple[Any, Any] | None = None
        self.sum: Any = None


class _NoGradientState(GradientState):
    """The state of all tensors that have none of their own; nothing can be written to it."""

    __slots__ = ()

    def __init__(self) -> None:
        for name, value in (("placeholder", False), ("reusable", None), ("shard", None), ("sum", None)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "shard_spec", None)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: this state belongs to all tensors. Take gradient_state(tensor).")


NO_GRADIENT_STATE = _NoGradientState()


def gradient_state(tensor: Any) -> GradientState:
    """The tensor's own state, made by the first call."""
    state: GradientState = tensor._gradient
    if state is NO_GRADIENT_STATE:
        state = tensor._gradient = GradientState()
    return state


def forget_sum(tensor: Any) -> None:
    """Drop the sum that was made of a tensor's gradient: a step has used it, or the gradient has changed."""
    if tensor._gradient is not NO_GRADIENT_STATE:
        tensor._gradient.sum = None
