"""A user's script that type checkers read: it uses every public name once. It is not run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb


def tensors() -> wb.GlobalTensor:
    """The world, layouts, creation, boxing."""
    wb.init()
    wb.manual_seed(wb.rank() * 0)
    wb.barrier()
    here = wb.placement("cpu", ranks=list(range(wb.world_size())))
    rows = wb.sbp.split(0)
    x = wb.randn(4, 6, placement=here, sbp=rows)
    made = [
        wb.zeros(4, 6, placement=here, sbp="B"), wb.ones(4, 6, placement=here, sbp="B"), x,
        wb.full((4, 6), 1.0, placement=here, sbp="B"), wb.empty(4, 6, placement=here, sbp="B"),
        wb.rand(4, 6, placement=here, sbp="B"), wb.tensor([[1.0]], placement=here, sbp="B"),
    ]  # fmt: skip
    whole = [
        wb.arange(4, placement=here, sbp="B"), wb.eye(4, placement=here, sbp="B"),
        wb.randint(0, 9, (4,), placement=here, sbp="B"), wb.randperm(4, placement=here, sbp="B"),
    ]  # fmt: skip
    y = (x @ wb.to_global(torch.ones(6, 2), placement=here, sbp="B")).to_global(sbp="B")
    first, *_ = wb.to_global(made + whole, sbp="B")
    print(first.full_tensor().sum().item(), y.to_local().shape, y.boxing_plan(sbp="S(0)"))
    wb.shutdown()
    return y


def training(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Strategies, steps, data, rules."""
    strategy = wb.Strategy("*: data")
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in wb.GlobalDataLoader(batch, batch_size=4):
        with wb.no_sync(model):
            loss = wb.forward_backward(model, F.cross_entropy, inputs, targets)
        wb.log(loss=loss.item())
        optimizer.step()
    print(wb.evaluate(model, batch[0]))
    wb.capture(optimizer.step)
    wb.register_rule("mylib::scale", "b d, d -> b d")
    wb.local_map(torch.relu, in_sbp="S(0)", out_sbp="S(0)")
    wb.rebuild()


def notebook(make_model: type[nn.Module], data: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Engines, comparisons, the panel."""
    with wb.Session(engines=2) as session:
        result = wb.compare(make_model, data, F.cross_entropy, ["*: data", "pipeline"], batch_size=8, session=session)
        wb.Panel(make_model, data, F.cross_entropy)
        wb.LiveView(session)
        wb.draw.runs(result)
        wb.draw.runs(wb.draw.SavedRuns())


def debug(x: wb.GlobalTensor, model: nn.Module) -> None:
    """Traces and checks."""
    with wb.debug.trace() as trace:
        x.sum()
    print(trace, wb.debug.timeline(model), wb.debug.memory_report(model))
    with wb.debug.profile("step.json", steps=3) as profile:
        model(x)
    print(profile, profile.ranks[0].share("idle_s"), wb.draw.memory(profile))
    with wb.debug.explicit_boxing(), wb.debug.find_nonfinite(model):
        wb.debug.check_agreement()
        print(wb.debug.first_difference(model, "*: data", batch=(x, x), loss_fn=F.mse_loss).layer)
    print(wb.debug.boxing_plan((x.placement, "S(0)"), (x.placement, "B"), (4, 4)), wb.debug.prove(torch.relu, x))


def checkpoints(model: nn.Module) -> None:
    """Files."""
    wb.checkpoint.save("step-1", model=model, async_op=True).wait()
    wb.checkpoint.load("step-1", model=model)
    wb.checkpoint.Checkpoints(Path("checkpoints"))
    wb.checkpoint.load_safetensors(model, "weights")
    wb.checkpoint.export_safetensors(model, "weights")


def planner(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What is best, and what it costs."""
    machine = wb.planner.calibrate()
    costs = wb.planner.layer_costs(model, batch[0], loss_fn=F.cross_entropy, targets=batch[1])
    print(machine, wb.planner.plan(costs, "h200", 8, 64))
    wb.planner.partition_stages(model, F.cross_entropy, *batch, 2)
    wb.planner.dry_run(lambda: model, "*: data", 8, *batch, F.cross_entropy)
    print(wb.planner.script("*: data | zero=3", 8, lambda: model, library="torch"))
    print(wb.planner.simulate(costs, "*: data", "h200", gpus=[8, 16], batch_size=64))


def pictures(x: wb.GlobalTensor, model: nn.Module) -> None:
    """Drawings."""
    wb.draw.matmul(x, x, x @ x)
    wb.draw.network((model, x, x))
    wb.draw.boxing(wb.debug.boxing_plan((x.placement, "S(0)"), (x.placement, "B"), (4, 4)))
    wb.draw.stages(("first", x.shape, "cpu", x.placement.ranks))
    wb.draw.timeline(wb.debug.timeline(model))
