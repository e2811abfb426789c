"""What a program changes in its world is in one object, and a world that goes on has the rest as it was."""

import copy
import dataclasses

import pytest
import torch

import workbench as wb
from workbench.tensors.execution_context import OUTSIDE, ExecutionContext, ModuleCall
from workbench.tensors.world import World, current
from workbench.testing import run_ranks

IDENTITY = ("rank", "world_size", "device", "transport", "generation", "num_rebuilds")


def test_values_hold_for_a_while_also_where_the_body_fails() -> None:
    context = ExecutionContext()

    def fails_inside() -> None:
        with context.temporarily(micro_batch=3, call=ModuleCall(num_samples=4)):
            assert (context.micro_batch, context.call.num_samples) == (3, 4)
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert (context.micro_batch, context.call) == (0, OUTSIDE)


def test_a_value_without_a_place_is_refused() -> None:
    with pytest.raises(AttributeError, match="trace"), ExecutionContext().temporarily(trace=None):
        pass


def test_tags_count_by_micro_batch() -> None:
    context = ExecutionContext()
    first = [context.next_tag() for _ in range(2)]
    with context.temporarily(micro_batch=1):
        second = [context.next_tag() for _ in range(2)]
        assert context.position == 2
        context.position = 0
        assert context.next_tag() == second[0]
    assert context.position == 2 and len({*first, *second}) == 4
    context.forget_progress()
    assert context.next_tag() == first[0]


def test_a_program_leaves_its_world_as_it_was() -> None:
    """Two steps of a pipeline, a trace, explicit boxing, an agreement check, a captured step and a failure."""

    def settings(world: World) -> dict[str, object]:
        context = {field.name: getattr(world.context, field.name) for field in dataclasses.fields(world.context)}
        for progress in ("num_edges", "num_sums", "latest", "batch"):  # they go on from step to step
            del context[progress]
        return {**{name: getattr(world, name) for name in IDENTITY}, **context}

    plain, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), torch.randn(8, 4)

    def program(rank: int) -> None:
        world = current()
        before, attributes = settings(world), set(vars(world))
        model = wb.parallelize(copy.deepcopy(plain), "0: data@0; 1: data@1 | mb=2")
        for _ in range(2):
            wb.forward_backward(model, lambda y, wanted: (y - wanted).square().mean(), x, x[:, :1])
        p = wb.placement("cpu", ranks=[0, 1])
        tensor = wb.ones(4, placement=p, sbp="B")
        step = wb.capture(lambda given: given * 2)
        with wb.debug.trace(), wb.debug.check_agreement():
            tensor.to_global(sbp="S(0)")
        for _ in range(3):
            step(tensor)
        with pytest.raises(wb.errors.WorkbenchError), wb.debug.explicit_boxing():
            tensor.to_global(sbp="S(0)") + tensor.to_global(sbp="P")
        assert settings(world) == before and set(vars(world)) == attributes

    run_ranks(program, num_ranks=2)
