"""Events of torch's profiler: on one clock with the rank, and what of them is computing."""

import time

import pytest
import torch

from workbench.training.profiling.torch_events import TorchRecording, computes, nccl_kernels, on_tracks


def event(name, category, start_us, length_us, pid=0, tid=7, **args):
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


ON_GPU = [
    event("aten::mm", "cpu_op", 0, 90, pid=4711, tid=4711),
    event("sgemm", "kernel", 10, 20, stream=7),
    event("Memcpy DtoD", "gpu_memcpy", 30, 5, stream=7, bytes=4096),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 20, 60, tid=20, stream=20),
    event("step", "gpu_user_annotation", 10, 70),
]
ON_CPU = [
    event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 0, 100),
    event("AddmmBackward0", "cpu_op", 5, 90),
    event("aten::mm", "cpu_op", 10, 20),
    event("Optimizer.step#SGD.step", "user_annotation", 100, 50),
    event("## Call CompiledFxGraph abc ##", "user_annotation", 160, 10),
]


def test_a_gpu_computes_in_kernels_and_copies():
    assert computes(ON_GPU) == [pytest.approx((10e-6, 30e-6)), pytest.approx((30e-6, 35e-6))]
    assert nccl_kernels(ON_GPU) == [pytest.approx((20e-6, 80e-6))]


def test_a_cpu_computes_in_operators_and_not_in_what_wraps_them():
    assert computes(ON_CPU) == [pytest.approx((10e-6, 30e-6)), pytest.approx((160e-6, 170e-6))]
    assert nccl_kernels(ON_CPU) == []


def test_threads_and_streams_have_tracks_of_their_own():
    flow = {"name": "ac2g", "ph": "s", "id": 3, "cat": "ac2g", "pid": 4711, "tid": 4711, "ts": 1}
    name = {"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    found = list(on_tracks([name, *ON_GPU, flow], rank=5))
    assert {each["pid"] for each in found} == {5}
    tracks = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert len(tracks) == 3 and "stream 7" in tracks.values() and "thread 4711" in tracks.values()
    assert next(each for each in found if each["ph"] == "s")["id"] == "5.3", "other ranks have the same numbers"
    assert next(each for each in found if each["name"] == "Memcpy DtoD")["args"] == {"stream": 7, "bytes": 4096}


def test_events_are_on_the_clock_of_the_rank(capfd):
    recording = TorchRecording(torch.device("cpu"))
    recording.start()
    before_s = time.perf_counter()
    torch.ones(300, 300) @ torch.ones(300, 300)
    after_s = time.perf_counter()
    recording.stop()
    [product] = [each for each in recording.events() if each["name"] == "aten::mm"]
    assert before_s - 1e-4 < product["ts"] / 1e6 < (product["ts"] + product["dur"]) / 1e6 < after_s + 1e-4
    assert capfd.readouterr().err == ""


def test_a_profiler_of_the_users_own_is_left_in_peace():
    recording = TorchRecording(torch.device("cpu"))
    with torch.profiler.profile() as own:
        recording.start()
        torch.ones(3) + 1
        recording.stop()
    assert recording.events() == [] and "was running already" in recording.problem
    assert any(each.key == "aten::add" for each in own.key_averages())


def test_nor_does_one_that_starts_meanwhile_break_it():
    recording = TorchRecording(torch.device("cpu"))
    recording.start()
    with torch.profiler.profile() as own:
        torch.ones(3) + 1
    recording.stop()
    assert recording.events() == [] and "another profiler" in recording.problem
    assert any(each.key == "aten::add" for each in own.key_averages())
