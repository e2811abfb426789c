"""What changes a captured step without changing its inputs is recorded anew."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import workbench as wb
from tests.training.capture.captured_runs import assert_same, called, filled, step_of
from workbench.errors import CaptureError, CaptureWarning
from workbench.tensors.world import current
from workbench.testing import run_ranks


def changes_of(module, optimizer):
    """What changes a step without changing its inputs, by name."""
    return {
        "strategy": lambda: wb.parallelize(module, "*: data | 1x2x1 zero=1", optimizer=optimizer),
        "mode": module.eval,
        "frozen": lambda: module[0].requires_grad_(False),
        "group": lambda: optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.5}),
    }


@pytest.mark.parametrize("name", ["strategy", "mode", "frozen", "group"])
def test_what_changes_the_step_is_recorded_anew(name):
    def program(capture):
        module = wb.parallelize(
            nn.Sequential(filled(nn.Linear(4, 8)), nn.Dropout(0.5), filled(nn.Linear(8, 3))), "*: data | 1x2x1"
        )
        optimizer = torch.optim.AdamW(module[0].parameters(), lr=0.1)
        step = step_of(module, optimizer)
        step = wb.capture(step) if capture else step
        losses = [called(step, 1).full_tensor() for _ in range(4)]
        changes_of(module, optimizer)[name]()
        losses += [called(step, 1).full_tensor() for _ in range(4)]
        assert not capture or (step.num_recordings, step.num_replays) == (2, 4)
        return [*losses, *(parameter.full_tensor().detach() for parameter in module.parameters())]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


def replace_parameter(module):
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)


def assign_parameters(module):
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()}, assign=True)


def replace_buffer(module):
    module[1].running_mean = module[1].running_mean + 1


def replace_layer(module):
    module[2] = nn.Identity()


def evaluate(module):
    module.eval()


@pytest.mark.parametrize("change", [replace_parameter, assign_parameters, replace_buffer, replace_layer, evaluate])
@pytest.mark.parametrize("is_parallelized", [True, False])
def test_a_module_of_other_parts_or_in_another_mode_is_recorded_anew(change, is_parallelized):
    """Also a module of the step that no strategy spreads, such as a teacher."""

    def program():
        module = nn.Sequential(filled(nn.Linear(4, 4)), nn.BatchNorm1d(4), filled(nn.Linear(4, 4)))
        module = wb.parallelize(module, "*: data") if is_parallelized else module
        module.train(change is evaluate)
        captured, x = wb.capture(lambda x: module(x).detach()), torch.arange(12.0).reshape(3, 4)
        before = called(lambda x: captured(x), 4, (3, 4))
        change(module)
        made = [captured(x) for _ in range(3)]
        wanted = module(x).detach()
        made, wanted = [[t.full_tensor() if is_parallelized else t for t in some] for some in (made, [wanted])]
        assert not torch.equal(wanted[0], before.full_tensor() if is_parallelized else before)
        assert all(torch.equal(each, wanted[0]) for each in made)
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 1)


def add_hook(module):
    return module.register_forward_hook(lambda module, inputs, output: output * 2)


def add_backward_hook(module):
    return module.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))


def add_parameter_hook(module):
    return module.weight.register_hook(lambda gradient: gradient * 2)


def add_late_parameter_hook(module):
    return module.weight.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.mul_(2))


def add_hook_of_all_modules(_module):
    return register_module_forward_hook(
        lambda module, inputs, output: output * 2 if isinstance(module, nn.Linear) else None
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("add", [add_hook, add_backward_hook, add_parameter_hook, add_late_parameter_hook])
def test_hooks_that_come_and_go(add):
    def program(capture):
        module = wb.parallelize(nn.Sequential(filled(nn.Linear(4, 4)), filled(nn.Linear(4, 4))), "*: data | 1x2x1")
        step = step_of(module, torch.optim.SGD(module.parameters(), lr=0.1))
        run, losses = wb.capture(step) if capture else step, []
        losses += [called(run, 1).full_tensor() for _ in range(4)]
        hook = add(module[1])
        losses += [called(run, 1).full_tensor() for _ in range(4)]
        hook.remove()
        losses += [called(run, 1).full_tensor() for _ in range(2)]
        assert not capture or (run.num_recordings, run.num_replays) == (2, 6)
        return losses

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


def test_a_hook_of_all_modules_that_comes_later():
    def program():
        module = filled(nn.Linear(4, 4))
        captured = wb.capture(lambda x: module(x).detach())
        before = called(captured, 3)
        hook = add_hook_of_all_modules(module)
        try:
            after = [called(captured, 1) for _ in range(3)]
        finally:
            hook.remove()
        assert all(torch.equal(each, before * 2) for each in after)
        assert torch.equal(called(captured, 1), before)
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 1)


@pytest.mark.parametrize("is_of_all", [False, True])
def test_a_hook_of_an_optimizer_that_comes_later_is_refused_as_an_earlier_one(is_of_all):
    """Replays went on without it. The call after it runs as written, with the hook."""

    num_ranks = 1 if is_of_all else 2

    def program():
        module = wb.parallelize(filled(nn.Linear(4, 4)), f"*: data | 1x{num_ranks}x1")
        optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
        step = wb.capture(step_of(module, optimizer))
        called(step, 3)
        add = register_optimizer_step_post_hook if is_of_all else optimizer.register_step_post_hook
        hook = add(lambda *_: seen.append(1))
        called(step, 1)
        try:
            with pytest.raises(CaptureError, match="SGD has 1 step hooks of its own"):
                called(step, 1)
        finally:
            hook.remove()
        called(step, 2)
        assert (seen, step.num_recordings, step.num_replays) == ([1], 2, 2)

    run_ranks(program, num_ranks)


def test_a_captured_step_within_another_one_is_a_part_of_it():
    """Also if it has replayed before the outer one is called: modes, and gradients to add to, are those of both."""

    def program(capture):
        module = wb.parallelize(nn.Sequential(filled(nn.Linear(4, 4)), nn.Dropout(0.5)), "*: data | 1x2x1")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        @capture
        def passes(x):
            loss = module(x).square().mean()
            loss.backward()
            return loss.detach()

        @capture
        def step(x):
            loss = passes(x)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [called(run, 1).full_tensor() for run in [passes] * 3 + [step] * 4]
        module.eval()
        return losses + [called(step, 1).full_tensor() for _ in range(4)]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (wb.capture, lambda step: step)))


def test_memory_of_parameters_that_were_replaced_is_free():
    def program():
        module = filled(nn.Linear(4, 4))
        captured = wb.capture(lambda x: module(x), max_recordings=1)
        for _ in range(4):
            called(captured, 3)
            before = weakref.ref(module.weight)
            module.weight = nn.Parameter(module.weight.detach() * 2)
            called(captured, 1)
            assert before() is None
        assert captured.num_recordings == 4

    run_ranks(program, 1)


def test_a_warning_says_that_parameters_moved_too_often():
    def program():
        module = wb.parallelize(filled(nn.Linear(4, 4)), "*: data")
        step = wb.capture(lambda x: module(x).detach(), max_recordings=2)
        called(step, 3)
        for _ in range(2):
            module.weight.data = module.weight.data.clone()
            called(step, 1)

    with pytest.warns(CaptureWarning, match=r"parameters or buffers have moved.*copy_.*max_recordings=2"):
        run_ranks(program, 1)


def test_modules_that_each_call_makes_are_no_reason_to_record_anew():
    """A loss that the step makes, for example, when inputs of several shapes take turns."""

    def program():
        module = filled(nn.Linear(4, 4))
        captured = wb.capture(lambda x: nn.MSELoss()(module(x), x).detach())
        for rows in (4, 4, 4, 5, 5, 4, 5):
            called(captured, 1, (rows, 4))
        return captured.num_recordings, captured.num_replays

    assert run_ranks(program, 1) == [(2, 3)]


def test_a_module_that_each_call_makes_may_have_a_tensor_that_it_makes():
    """The error was that the weights outlive the step."""

    def program():
        captured = wb.capture(lambda x: nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]) * 2)(x, torch.tensor([0, 1])))
        x = torch.arange(4.0).reshape(2, 2)
        made = [captured(x) for _ in range(3)]
        assert torch.allclose(made[2], made[0]) and captured.num_replays == 1

    run_ranks(program, 1)


def test_modules_that_change_before_each_call_are_told():
    def program():
        module = filled(nn.Linear(4, 4))
        captured = wb.capture(lambda x: module(x))
        for _ in range(10):
            module.weight = nn.Parameter(module.weight.detach() * 2)
            assert torch.equal(called(captured, 1), module(torch.ones(4, 4)))

    with pytest.warns(CaptureWarning, match="before each of 8 calls its modules had got other"):
        run_ranks(program, 1)


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_after_a_rebuild_all_ranks_record_anew_because_not_all_may_have_a_recording(num_calls):
    """Rank 1 was interrupted in the call that recorded on rank 0, or its process is new."""

    def program(breaks_off):
        module = wb.parallelize(filled(nn.Linear(4, 3)), "*: data | 1x2x1")
        step = step_of(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        captured = wb.capture(step, max_recordings=1)
        losses = [called(captured, 1).full_tensor() for _ in range(num_calls)]
        if breaks_off:
            world = current()
            captured = wb.capture(step, max_recordings=1) if world.rank == 1 else captured
            world.rejoin(world.world_size, world.transport)
        losses += [called(captured, 1).full_tensor() for _ in range(4)]
        assert captured.num_replays >= 2
        return losses

    assert_same(*(run_ranks(lambda breaks_off=breaks_off: program(breaks_off)) for breaks_off in (True, False)))
