"""A captured step is recorded anew when a number changes that it reads from a module, and only then."""

import random
import threading
import warnings
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import Config, Trainer, called, filled
from workbench.errors import CaptureWarning
from workbench.testing import run_ranks
from workbench.training.capture.read_numbers import read_numbers


class Pair(tuple):
    """A tuple that may have attributes, which is compared by value as others are."""


class Tempered(nn.Module):
    """A layer with dropout, and a temperature that a program lowers."""

    def __init__(self, counts=False):
        super().__init__()
        self.fc, self.drop = filled(nn.Linear(4, 4)), nn.Dropout(0.0)
        self.tau, self.counts, self.num_calls, self.newest, self.cfg = 1.0, counts, 0, None, Config()
        self.pair = Pair((1, 2))

    def forward(self, x):
        if self.counts:
            self.num_calls += 1
            self.newest = x
        return self.drop(self.fc(x)) * (self.cfg.t / self.tau / self.pair[0])


def lower(module):
    module.tau *= 0.5


def drop_all(module):
    module.drop.p = 1.0


@pytest.mark.parametrize(
    ("change", "backend"), [(lower, None), (drop_all, None), pytest.param(lower, "inductor", marks=pytest.mark.slow)]
)
def test_another_number_of_a_module_is_recorded_anew(change, backend):
    def program():
        module = wb.parallelize(Tempered(), "*: data")
        captured, x = wb.capture(lambda x: module(x).detach(), backend=backend), torch.arange(12.0).reshape(3, 4)
        before = called(lambda x: captured(x).full_tensor(), 3, (3, 4))
        change(module)
        wanted = module(x).full_tensor()
        assert not torch.allclose(wanted, before)
        for _ in range(3):
            torch.testing.assert_close(captured(x).full_tensor(), wanted.detach())
        assert (captured.num_recordings, captured.num_replays) == (2, 2)

    run_ranks(program, 1)


def test_a_value_that_comes_again_has_its_recording():
    def program():
        module = Tempered()
        captured = wb.capture(lambda x: module(x))
        for _ in range(6):
            for module.tau in (1.0, 2.0):
                assert torch.equal(called(captured, 1), module(torch.ones(4, 4)))
        assert (captured.num_recordings, captured.num_replays) == (2, 8)

    run_ranks(program, 1)


@pytest.mark.parametrize("shapes", [[(4, 4)], [(4, 4), (3, 4)]])
def test_a_warning_names_numbers_that_the_step_changes(shapes):
    def program():
        module = Tempered(counts=True)
        captured = wb.capture(lambda x: module(x))
        for _ in range(4):
            for shape in shapes:
                called(captured, 1, shape)
        assert captured.num_recordings == len(shapes) and captured.num_replays >= len(shapes)
        module.tau = 4.0
        assert torch.equal(called(captured, 1), module(torch.ones(4, 4)))

    with pytest.warns(CaptureWarning, match=r"numbers that are in no tensor: Tempered.num_calls \(\d, then \d\)"):
        run_ranks(program, 1)


def set_on_one_rank(module, number):
    if wb.rank() == 0:
        module.last_log = number


def set_on_all_ranks(module, number):
    module.global_step = module.fc.seen = module.cfg.global_step = number
    module.pair = Pair((1, 2))


@pytest.mark.parametrize("change", [set_on_one_rank, set_on_all_ranks])
def test_numbers_that_the_step_does_not_read_may_change(change):
    """Ranks that record while others replay would wait for each other."""

    def program():
        module = wb.parallelize(Tempered(), "*: data | 1x2x1")
        captured = wb.capture(lambda x: module(x).detach())
        for number in range(12):
            change(module, number)
            called(captured, 1)
        return captured.num_recordings, captured.num_replays

    assert run_ranks(program) == [(1, 10)] * 2


class Scaled(nn.Module):
    """A layer with a factor that ``find`` gets from it."""

    scale = 1.0

    def __init__(self, find, **attributes):
        super().__init__()
        self.find = find
        self.__dict__ |= attributes

    def forward(self, x):
        found = self.find(self)
        return x * (found if isinstance(found, torch.Tensor) else float(found))


class Size(Enum):
    SMALL, LARGE = 1, 2

    def __float__(self):
        return float(self.value)


class OwnGetattr(Scaled):
    """Takes what it lacks from the module in it, as wrappers do."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class OwnGetattribute(Scaled):
    def __getattribute__(self, name):
        return super().__getattribute__(name.removeprefix("my_"))


def wrapped():
    module = OwnGetattr(lambda module: module.tau)
    module.inner = Scaled(None, tau=1)
    return module


def of(module, name):
    return getattr(module, name, 1.0)


def set_to(value, name="tau"):
    return lambda module: setattr(module, name, value)


CASES = {
    "float32": (lambda: Scaled(lambda m: m.tau, tau=np.float32(1)), set_to(np.float32(2))),
    "int64": (lambda: Scaled(lambda m: m.tau, tau=np.int64(1)), set_to(np.int64(2))),
    "bool": (lambda: Scaled(lambda m: m.tau, tau=np.bool_(True)), set_to(np.bool_(False))),
    "enum": (lambda: Scaled(lambda m: m.tau, tau=Size.SMALL), set_to(Size.LARGE)),
    "list": (lambda: Scaled(lambda m: m.w[1], w=[1, 1.0]), lambda m: m.w.__setitem__(1, 2.0)),
    "dict": (lambda: Scaled(lambda m: m.w["kl"], w={"kl": 1}), lambda m: m.w.update(kl=2)),
    "tuple": (lambda: Scaled(lambda m: m.w[0], w=(1,)), set_to((2,), "w")),
    "of the class": (lambda: Scaled(lambda m: m.scale), set_to(2.0, "scale")),
    "absent": (lambda: Scaled(lambda m: of(m, "tau")), set_to(2.0)),
    "tensor": (lambda: Scaled(lambda m: m.w[0], w=torch.ones(2)), lambda m: setattr(m, "w", torch.full((2,), 2.0))),
    "of an object": (lambda: Scaled(lambda m: m.cfg.t, cfg=Config(t=1)), lambda m: setattr(m.cfg, "t", 2)),
    "of an object's": (lambda: Scaled(lambda m: m.cfg.o.t, cfg=Config(o=Config())), lambda m: setattr(m.cfg.o, "t", 2)),
    "another object": (lambda: Scaled(lambda m: m.cfg.t, cfg=Config()), lambda m: setattr(m, "cfg", Config(t=2))),
    "function": (lambda: Scaled(lambda m: 1), lambda m: setattr(m, "find", lambda m: 2)),
    "method": (lambda: Scaled(Trainer(1).factor), lambda m: setattr(m, "find", Trainer(2).factor)),
    "forward": (lambda: Scaled(lambda m: 1), lambda m: setattr(m, "forward", lambda x: x * 2)),
    "own getattr": (wrapped, lambda m: setattr(m.inner, "tau", 2)),
    "own getattribute": (lambda: OwnGetattribute(lambda m: m.my_tau, tau=1), set_to(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_all_kinds_that_the_step_reads(name):
    make, change = CASES[name]

    def program():
        module = make()
        captured = wb.capture(lambda x: module(x))
        before = called(captured, 4)
        change(module)
        wanted = module(torch.ones(4, 4))
        assert not torch.equal(wanted, before)
        for _ in range(3):
            assert torch.equal(called(captured, 1), wanted)
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 1)


@pytest.mark.parametrize("make_nan", [float, np.float32, np.float64])
def test_nan_is_equal_to_itself_and_guarded(make_nan):
    def program():
        module = Scaled(lambda module: 1.0 if module.tau != module.tau else module.tau)
        captured = wb.capture(lambda x: module(x))
        for _ in range(4):
            module.tau = make_nan("nan")
            called(captured, 1)
        assert (captured.num_recordings, captured.num_replays) == (1, 2)
        module.tau = make_nan(2)
        assert torch.equal(called(captured, 1), torch.full((4, 4), 2.0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(program, 1)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, weight):
        return weight * self.factor


def test_numbers_of_a_parametrization():
    def program():
        module = filled(nn.Linear(4, 4))
        nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
        captured = wb.capture(lambda x: module(x))
        called(captured, 3)
        module.parametrizations.weight[0].factor = 3.0
        for _ in range(3):
            assert torch.equal(called(captured, 1), module(torch.ones(4, 4)))
        assert (captured.num_recordings, captured.num_replays) == (2, 2)

    run_ranks(program, 1)


def test_a_number_of_one_stage_is_recorded_anew_on_all_ranks():
    def program(capture):
        module = nn.Sequential(filled(nn.Linear(4, 4)), Tempered())
        module = wb.parallelize(module, "0: data@0; 1: data@1 | 2x1x1 mb=2")
        losses = []

        def step(x, y):
            return wb.forward_backward(module, nn.functional.mse_loss, x, y)

        run = wb.capture(step) if capture else step
        for tau in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
            module[1].tau = tau
            module.zero_grad()
            losses.append(run(torch.ones(4, 4), torch.zeros(4, 4)).full_tensor())
        assert not capture or (run.num_recordings, run.num_replays) == (2, 3)
        return losses

    captured, live = (run_ranks(lambda capture=capture: program(capture)) for capture in (True, False))
    assert captured == live


def test_a_warning_names_the_number_that_changes_too_often():
    def program():
        module = Tempered()
        captured = wb.capture(lambda x: module(x), max_recordings=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                lower(module)
                called(captured, 1)
        lower(module)
        with pytest.warns(CaptureWarning, match=r"change between calls: Tempered.tau \(0.0625, then 0.015625\)"):
            called(captured, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                lower(module)
                assert torch.equal(called(captured, 1), module(torch.ones(4, 4)))
        assert (captured.num_recordings, captured.num_replays) == (2, 0)

    run_ranks(program, 1)


def test_a_number_that_the_step_sets_back_is_none_that_it_changes():
    def program():
        module = Tempered()

        def step(x):
            module.tau = module.cfg.t = 2.0
            result = module(x)
            module.tau = module.cfg.t = 1.0
            return result

        captured = wb.capture(step)
        called(captured, 4)
        assert (captured.num_recordings, captured.num_replays) == (1, 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(program, 1)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.of_old = np.random.default_rng(0), np.random.RandomState(0)

    def forward(self, x):
        return x + self.draw(self)


@pytest.mark.parametrize(
    "draw",
    [
        lambda m: random.random(),
        lambda m: np.random.rand(),  # noqa: NPY002
        lambda m: m.generator.random(),
        lambda m: m.of_old.rand(),
    ],
)
def test_a_warning_says_that_numbers_of_python_and_numpy_are_not_drawn_again(draw):
    def program():
        module = Noisy()
        module.draw = draw
        captured = wb.capture(lambda x: module(x))
        called(captured, 1)
        with pytest.warns(CaptureWarning, match="in no tensor: random numbers of Python or numpy"):
            called(captured, 1)
        called(captured, 2)
        assert captured.num_replays == 2

    run_ranks(program, 1)


def test_modules_are_as_before_after_an_error_in_the_step():
    def program():
        module = Tempered()

        def step(x):
            assert fails == ("__getattribute__" in vars(nn.Module)) == ("__getattribute__" in vars(Config))
            if fails:
                raise ValueError("stop")
            return module(x)

        captured, fails = wb.capture(step), False
        called(captured, 1)
        fails = True
        with pytest.raises(ValueError, match="stop"):
            called(captured, 1)
        assert "__getattribute__" not in {*vars(nn.Module), *vars(Config)}

    run_ranks(program, 1)


def test_threads_that_record_at_the_same_time_note_their_own_reads():
    modules, found = [Tempered(), Tempered()], [None, None]
    begun, ended = threading.Barrier(2), threading.Barrier(2)

    def read(number):
        with read_numbers() as reads:
            begun.wait(60)
            _ = modules[number].tau
            ended.wait(60)
        found[number] = reads

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [list(reads) for reads in found] == [[(id(module), "tau")] for module in modules]
    assert "__getattribute__" not in vars(nn.Module)
