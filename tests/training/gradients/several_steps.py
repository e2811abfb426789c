"""Optimizers of users whose step evaluates the model again, or calls the steps of other optimizers."""

from __future__ import annotations

import torch


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as published (Foret et al., 2021; the code of davda54/sam)."""

    def __init__(self, params, base_optimizer, rho=0.05, adaptive=False, **kwargs):
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        device = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    ((torch.abs(p) if group["adaptive"] else 1.0) * p.grad).norm(p=2).to(device)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


class Armijo(torch.optim.Optimizer):
    """Gradient descent that halves its rate until the loss falls enough."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters]
        grads = [p.grad.clone() for p in parameters]
        slope = sum(float(grad.square().sum()) for grad in grads)
        rate = self.param_groups[0]["lr"]
        for _ in range(8):
            with torch.no_grad():
                for p, old, grad in zip(parameters, before, grads, strict=True):
                    p.copy_(old - rate * grad)
            with torch.enable_grad():
                found = closure()
            if float(found) <= float(loss) - 0.5 * rate * slope:
                break
            rate /= 2
        return loss


class Chain(torch.optim.Optimizer):
    """Several optimizers as one, whose groups are theirs."""

    def __init__(self, *parts):
        self.parts = parts
        super().__init__([g for p in parts for g in p.param_groups], {})

    def step(self, closure=None):
        for p in self.parts:
            p.step()


class WarmUp(torch.optim.Optimizer):
    """Groups of its own over the parameters of another optimizer, whose rate and gradients it changes."""

    def __init__(self, params, kind, lr):
        params = list(params)
        super().__init__(params, {})
        self.inner, self.rate, self.count = kind(params, lr=lr), lr, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.inner.param_groups:
            group["lr"] = self.rate * min(1.0, self.count / 3)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        self.inner.step()


class Lookahead(torch.optim.Optimizer):
    """k steps forward, 1 step back (Zhang et al., 2019), around another optimizer with the same groups."""

    def __init__(self, inner, k=2, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.clone()
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss


class Wrapper(torch.optim.Optimizer):
    """Shows groups and state of another optimizer as its own, as accelerate, Opacus and ScheduleFree do."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Unknown(torch.optim.Optimizer):
    """Steps an optimizer that is none of its attributes."""

    def __init__(self, inner):
        self.call = lambda: inner.step()
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.call()


class TwoKinds(torch.optim.Optimizer):
    """Steps on matrices itself, and has another optimizer for the others, as Muon does."""

    def __init__(self, params, lr=0.1):
        params = list(params)
        super().__init__([p for p in params if p.dim() > 1], {"lr": lr})
        self.others = torch.optim.AdamW([p for p in params if p.dim() <= 1], lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum / (momentum.norm() + 1e-6), alpha=group["lr"])
        self.others.step()
