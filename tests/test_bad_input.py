"""Mistakes that a newcomer makes with the public names: the error says what to write instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import workbench as wb
from workbench import api
from workbench.core.placement import Placement
from workbench.testing import run_ranks


def test_errors_say_what_to_write() -> None:
    def program(rank: int) -> None:
        here = wb.placement("cpu", ranks=[0, 1])
        x = wb.ones(4, 4, placement=here, sbp="S(0)")
        model = nn.Linear(4, 2)
        mistakes = [
            (lambda: wb.parallelize(model, "pipline"), r"did you mean 'pipeline'\?"),
            (lambda: wb.parallelize(model, "fsdp"), r"here 'fsdp' is '\*: data \| zero=3'"),
            (lambda: wb.parallelize(model, "data | mb=4 1fb1"), r"option '1fb1' .*did you mean '1f1b'\?"),
            (lambda: wb.parallelize(model, "data | zero3"), r"did you mean 'zero=3'\?"),
            (lambda: x.to_global("B"), "placement='B' is a str.*by name: sbp="),
            (lambda: wb.to_global(torch.ones(2), [0, 1], "B"), r"placement=\[0, 1\] is a list. Write wb.placement"),
            (lambda: x.to_global(x), "is a GlobalTensor. Write wb.placement"),
            (lambda: x.to_global(sbp=torch.ones(1)), "Tensor is no layout. Give sbp.split"),
            (lambda: wb.to_global([1.0], here, "B"), "tensor 0 of 1 is a float"),
            (lambda: wb.to_global(1.0, here, "B"), r"a float is neither.*torch.as_tensor\(x\)"),
            (lambda: wb.to_global(torch.ones(2).numpy(), here, "B"), r"a ndarray is neither.*torch.as_tensor\(x\)"),
            (lambda: wb.to_global(torch.ones(2), here, "B", broadcast_from=2), "broadcast_from=2.*ranks 0 to 1"),
            (lambda: wb.ones(2, placement=[0, 1], sbp="B"), r"placement=\[0, 1\] is a list. Write wb.placement"),
            (
                lambda: wb.placement([0, 1]),
                r"placement\(\[0, 1\]\): which ranks\? Name some of 0 to 1, as in wb.placement\(r",
            ),
            (lambda: wb.randint(5, 2, (3,), placement=here, sbp="B"), r"no integer lies in \[5, 2\)"),
            (lambda: wb.debug.boxing_plan("S(0)", "B", (4, 4)), "'S.0.' is a str, not a layout.*layout_on_ranks"),
            (lambda: wb.draw.network(x), r"layer 0 is a GlobalTensor, not \(x, w, out\).*wb.draw.network\(\("),
            (lambda: wb.draw.boxing(x), r"a GlobalTensor is no plan. Give x.boxing_plan\(sbp=...\)"),
            (lambda: wb.draw.timeline(model), r"a Linear is no timeline.*wb.debug.timeline\(model\)"),
            (
                lambda: wb.planner.dry_run(model, "data", 2, torch.ones(4, 4)),
                "model_fn is a Linear.*without calling",
            ),
            (lambda: wb.paralelize, r"Did you mean 'parallelize'\?"),
            (lambda: wb.debug.trac, r"Did you mean 'trace'\?"),
        ]
        for mistake, message in mistakes:
            with pytest.raises((ValueError, AttributeError), match=message):
                mistake()

    run_ranks(program, 2)


def test_a_placement_is_on_the_device_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda:1"):
        world = SimpleNamespace(device=torch.device(device), world_size=4)
        monkeypatch.setattr(api, "current", lambda world=world: world)
        kind = world.device.type
        assert wb.placement(ranks=[[3], [1]]) == Placement.of(kind, [[3], [1]]) != wb.placement("meta", [[3], [1]])
        assert wb.placement.all() == Placement.of(kind, range(4))


def test_a_single_global_tensor_keeps_what_is_left_out() -> None:
    def program(rank: int) -> None:
        x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        assert wb.to_global(x, sbp="B").to_local().shape == (4, 4)
        (y,) = wb.to_global(iter([x]), sbp="B")
        assert y.to_local().shape == (4, 4)

    run_ranks(program, 2)
