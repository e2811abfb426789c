"""Custom autograd functions as people write them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import Function, once_differentiable


class Gelu(Function):
    """Element by element, with a backward by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * grad


class Norm(Function):
    """Works on rows, saves an intermediate, and takes a number; its backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x * scale, scale, weight)
        return x * scale * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normed, scale, weight = ctx.saved_tensors
        inner = grad * weight
        grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0), None


class Two(Function):
    """Several results, one without a gradient, in the style of ``setup_context``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y, flips=False):
        return torch.exp(-x if flips else x) * y, x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, flips = inputs
        ctx.save_for_backward(output[0], torch.exp(-x if flips else x))
        ctx.sign = -1 if flips else 1
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        result, factor = ctx.saved_tensors
        return ctx.sign * result * grad, factor * grad, None


class AddTo(Function):
    """Writes into its second argument."""

    @staticmethod
    def forward(ctx, x, target, factor):
        ctx.mark_dirty(target)
        ctx.factor = factor
        return target.add_(x * factor)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, grad, None


class ClampedGradient(Function):
    """Its backward is not linear: a term of a gradient is not a part of it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.5, 0.5)


class NormedGradient(Function):
    """Its backward needs the whole gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm().clamp(min=1)


class InNumpy(Function):
    """Does not run on tensors without data."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Cube(Function):
    """Differentiable twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Noisy(Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand(x.shape, dtype=x.dtype) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Unmarked(Function):
    """Writes into its argument and does not say so."""

    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Capturing(Function):
    """Uses a tensor that an object holds."""

    @staticmethod
    def forward(ctx, x, holder):
        return x * holder.weight.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherLayer(Function):
    """As SimCLR's: one tensor per process."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class SumOfGradients(Function):
    """Its backward alone exchanges; a random forward is examined without a backward."""

    @staticmethod
    def forward(ctx, x, noise):
        return x + noise * torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad, None


class Ranged(Function):
    """Scales by what an object, a plain tensor and a dict keep, and changes all of them."""

    @staticmethod
    def forward(ctx, x, layer, counts, reads_value):
        with torch.no_grad():
            layer.largest.mul_(0.5).add_(x.abs().max())
        counts["calls"] += 1
        layer.range = 0.5 * layer.range + (x.max().item() if reads_value else 1.0)
        ctx.scale = layer.range * counts["calls"]
        return x * ctx.scale / layer.largest

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None, None, None


class WithModule(Function):
    """Calls a module that is an argument, with its parameters beside it."""

    @staticmethod
    def forward(ctx, x, module, *parameters):
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


class Masked(Function):
    """Returns and keeps a mask, which has no gradient; ``keeps`` says where."""

    @staticmethod
    def forward(ctx, x, keeps="saved"):
        mask = x > 0
        if keeps == "saved":
            ctx.save_for_backward(mask)
        elif keeps == "attribute":
            ctx.mask = mask
        else:
            keeps.append(mask)
            ctx.mask = mask
        return x * mask, mask

    @staticmethod
    def backward(ctx, grad, _):
        return grad * (ctx.saved_tensors[0] if ctx.saved_tensors else ctx.mask), None


class Largest(Function):
    """Returns and saves indices, which have no gradient."""

    @staticmethod
    def forward(ctx, x):
        values, indices = x.topk(2, -1)
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        return grad.new_zeros(ctx.shape).scatter(-1, ctx.saved_tensors[0], grad)


class Constant(Function):
    """Returns a tensor of its class beside its result."""

    table = torch.ones(3)

    @staticmethod
    def forward(ctx, x):
        return x * 2, Constant.table

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 2
