"""A step that cannot be compiled is taken again as it is, from the state before."""

import copy

import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.runs.compiled_steps import CompiledSteps


class Listing(torch.optim.Optimizer):
    """Its state has a count of no parameter, a tensor that is another one after each step, and a list."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["step"] = self.state.get("step", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["sum"] = state.get("sum", 0) + parameter.grad
                newest = state.setdefault("newest", [])
                newest.append(parameter.grad.clone())
                parameter.sub_(0.1 * (state["sum"] / self.state["step"] + newest[len(newest) // 2]))


def test_a_refused_step_changes_no_state():
    torch.manual_seed(0)
    made, inputs = nn.Linear(4, 3), torch.randn(6, 4)

    def program(compiles):
        model = wb.parallelize(copy.deepcopy(made), "*: data")
        optimizer, kept = Listing(model.parameters()), []

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(loss.detach() * 2)  # outlives the step
            return loss.detach()

        run = CompiledSteps(step, model, optimizer, torch.Generator()) if compiles else step
        losses = [run(inputs).full_tensor() for _ in range(4)]
        assert not compiles or "outlives" in run.problem
        assert optimizer.state["step"] == 4 and all(len(optimizer.state[p]["newest"]) == 4 for p in model.parameters())
        return torch.stack(losses)

    expected = run_ranks(lambda: program(False), 2)
    for found, truth in zip(run_ranks(lambda: program(True), 2), expected, strict=True):
        assert torch.equal(found, truth)
