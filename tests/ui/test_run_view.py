"""The live view: what a run reports, in words, in the figure and in the log."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.ui.conftest import make_record
from tests.ui.live_figures import MEMORY, marks, titles, trace
from tests.ui.reports import block, spans
from workbench.core.metrics import RunEvent
from workbench.errors import CellError
from workbench.session.protocol import Failure
from workbench.theme import DARK, LIGHT
from workbench.ui.live import figure_layout as figure_layout
from workbench.ui.live import live_figure
from workbench.ui.live.history import History
from workbench.ui.live.run_view import RunView


@pytest.fixture
def view() -> RunView:
    made = RunView(2)
    made._clock = lambda: made_time[0]  # type: ignore[attr-defined]
    made_time = [100.0]
    made.tick = lambda seconds: made_time.__setitem__(0, made_time[0] + seconds)  # type: ignore[attr-defined]
    made.begin("data", "*: data", 10)
    return made


def test_a_view_shows_state_progress_and_log(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0, 1.5), memory=MEMORY), spans(0), spans(1)])
    assert "step 2 of 10" in view.status.state.value and view.status.progress.value == 2
    assert "20 %" in view.status.elapsed.value and "400 ms so far, 1.60 s left" in view.status.elapsed.value, (
        "without what came before"
    )
    assert "data: *: data" in view.log_section.lines.value and "step 2" in view.log_section.lines.value
    assert len(trace(view.shown.figure, "forward, measured").x) == 2


def test_updates_come_at_most_ten_times_a_second_and_slow_parts_less_often(view: RunView):
    counts = dict.fromkeys(("show_curves", "show_memory", "show_timeline"), 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            real = getattr(live_figure, name)

            def counted(*args: object, _real: object = real, _name: str = name) -> None:
                counts[_name] += 1
                _real(*args)  # type: ignore[operator]

            patch.setattr(live_figure, name, counted)
        for step in range(100):  # two seconds, fifty times a second
            view.tick(0.02)
            view.add([block(step, memory=MEMORY, num_steps=100), spans(0, step), spans(1, step)])
    assert counts["show_curves"] <= 20 and 2 <= counts["show_memory"] <= 5 and counts["show_timeline"] <= 3


def test_nothing_is_drawn_while_nobody_looks_and_all_of_it_once_somebody_does(view: RunView):
    view.link._receive(None, {"event": "visible", "value": False}, None)
    view.tick(1)
    view.add([block(0, (2.0, 1.5), memory=MEMORY)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 0
    view.link._receive(None, {"event": "visible", "value": True}, None)
    assert len(trace(view.shown.figure, "throughput, newest").x) == 2


def test_a_view_is_seen_while_any_of_its_places_is(view: RunView):
    for place, seen in (("one", True), ("other", True), ("one", False)):
        view.link._receive(None, {"event": "visible", "value": seen, "view": place}, None)
    view.tick(1)
    view.add([block(0, (2.0, 1.5), memory=MEMORY)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 2
    view.link._receive(None, {"event": "visible", "value": False, "view": "other"}, None)
    view.tick(1)
    view.add([block(2, (1.0,), memory=MEMORY)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 2


def test_a_page_that_comes_later_gets_the_figure_as_it_is(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0, 1.5), memory=MEMORY), spans(0), spans(1)])
    state = view.shown.get_state()
    points = {trace["name"]: trace for name, trace in state.items() if name.startswith("trace_")}
    assert points["this run, newest"]["y"] == [2.0, 1.5]
    assert "1.5" in state["outline"]["annotations"][1]["text"]


def test_what_has_ended_stays_as_its_end_was_drawn(view: RunView):
    view.add([block(0, (2.0,))])
    view.finish(make_record("data"))
    for seen in (False, True):
        view.link._receive(None, {"event": "visible", "value": seen}, None)
    assert "samples/s, median" in titles(view.shown.figure)[0]


def test_what_is_sent_is_plain_json(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,), memory=MEMORY), spans(0), spans(1)])
    description = ["outline", *(f"trace_{index}" for index in range(view.shown.num_traces))]
    json.dumps(view.shown.get_state(description), allow_nan=False)
    assert list(view.shown.figure.layout.xaxis3.range) == [0, 6]


def test_a_page_that_cannot_keep_up_is_not_flooded(view: RunView):
    sent: list[dict[str, object]] = []
    view.link.send = lambda message, buffers=None: sent.append(message)
    view.link._receive(None, {"event": "visible", "value": True}, None)
    view.tick(1)
    view.add([block(0)])
    assert [message["event"] for message in sent] == ["ping"]
    view.tick(1)
    view.add([block(1)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 1, "it has not answered yet"
    view.link._receive(None, {"event": "pong", "value": 1}, None)
    view.add([block(2)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 3
    view.tick(6)
    view.add([block(3)])
    assert len(trace(view.shown.figure, "throughput, newest").x) == 4, "after five seconds nobody waits for it"


def test_a_change_draws_a_line_and_names_the_strategy(view: RunView):
    view.add([block(0, (2.0,)), RunEvent("strategy", 1, "*: model", 0.2, 0)], {"*: model": "model"}.__getitem__)
    layout = view.shown.figure.layout
    assert layout.shapes[0].x0 == 2 and layout.annotations[-1].text == "data \u2192 model"
    assert "data \u2192 model" in view.log.lines[-1].text
    assert "data \u2192 model" in view.title.value and "*: model" in view.title.value


def test_names_that_are_texts_have_room_beside_the_change(view: RunView):
    text = "fc1: data; fc2: model; fc3: model; head: data | 1x1x2"
    view.add([block(0, (2.0,)), RunEvent("strategy", 1, text, 0.2, 0)])
    assert view.shown.figure.layout.annotations[-1].text == "data \u2192 fc1: dat\u2026| 1x1x2"
    assert view.title.value.count(text) == 1, "the title has all of it, once"


def test_names_in_the_figure_are_text(view: RunView):
    view.expect(None, limit=(3e6, "<own>"))
    view.add([block(0, (2.0,), memory=MEMORY), RunEvent("strategy", 1, "*: model")], lambda text: "<b>")
    notes = [note.text for note in view.shown.figure.layout.annotations]
    assert "data \u2192 &lt;b&gt;" in notes and "&lt;own&gt;: 3.00 MB" in notes


def test_a_pause_stops_the_clock(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,)), RunEvent("paused", 1)])
    assert "paused" in view.status.state.value and len(marks(view.shown.figure, "annotations", "pause")) == 2
    view.tick(50)
    view.add([RunEvent("running", 1)])
    assert not marks(view.shown.figure, "annotations", "pause")
    view.tick(1)
    view.add([block(1, (2.0,))])
    assert "1.20 s so far" in view.status.elapsed.value and "running" in view.status.state.value


def test_a_run_that_is_stopped_while_it_is_paused_has_not_trained_in_the_pause(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,)), RunEvent("paused", 1)])
    view.tick(600)
    view.finish(make_record("data"))
    assert "200 ms<" in view.status.elapsed.value


def test_what_follows_the_last_step_is_no_training_time(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,) * 10)])
    view.stopwatch.stop()
    view.status.show_state("running", "comparing", "with one device")
    view.tick(20)
    view.see_status(True)
    assert "comparing" in view.status.state.value and "100 %</b> 2.00 s<" in view.status.elapsed.value
    view.finish(make_record("data", losses=(2.0,) * 10, step_times_s=(0.2,) * 10))
    assert "finished" in view.status.state.value and "100 %</b> 2.00 s<" in view.status.elapsed.value


def test_the_rate_of_one_device_does_not_take_a_short_batch_for_all(view: RunView):
    steps = block(0, (3.0, 2.0, 1.0), time_s=(0.1,), boxing_s=(0.0,))
    view.add_one_device(replace(steps, samples=(128, 128, 1)))
    assert "1\u202f280 samples/s" in view.status.elapsed.value


def test_the_end_shows_the_record(view: RunView):
    view.add([block(0, (2.0,))])
    view.finish(make_record("data"))
    assert "stopped" in view.status.state.value and len(trace(view.shown.figure, "throughput").x) == 3
    assert "5\u202f000 samples/s, median" in titles(view.shown.figure)[0]


def test_one_step_is_a_marker(view: RunView):
    lines = "throughput, newest", "median, newest", "this run, newest", "1 device"
    view.show_one_device([2.0])
    view.add([block(0, (2.0,))])
    assert {trace(view.shown.figure, name).mode for name in lines} == {"lines+markers"}
    view.show_one_device([2.0, 1.0])
    view.tick(1)
    view.add([block(1, (1.0,))])
    assert {trace(view.shown.figure, name).mode for name in lines} == {"lines"}
    view.finish(make_record("data", losses=(2.0,), step_times_s=(0.1,)))
    assert trace(view.shown.figure, "this run").mode == trace(view.shown.figure, "throughput").mode == "lines+markers"


def test_the_throughput_of_short_batches_is_that_of_their_samples(view: RunView):
    view.add([block(0, (2.0,))])
    view.finish(make_record("data", samples=(100, 100, 5)))
    assert trace(view.shown.figure, "throughput").y.tolist() == [10_000, 5000, 200]


def test_what_was_stopped_has_no_time_left(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,))])
    assert " left" in view.status.elapsed.value
    view.finish(make_record("data"))
    assert "left" not in view.status.elapsed.value and "so far" not in view.status.elapsed.value


def test_the_state_is_shown_while_only_the_bar_is_in_sight(view: RunView):
    outside = RunView(2, has_status=False)
    outside.begin("data", "*: data", 10)
    assert not any(
        part in bar.children
        for bar in outside.box.children
        if hasattr(bar, "children")
        for part in outside.status.parts
    )
    outside.link._receive(None, {"event": "visible", "value": False}, None)
    outside.add([block(0, (2.0,))])
    assert "step 1 of 10" in outside.status.state.value and outside.status.progress.value == 1
    assert len(trace(outside.shown.figure, "throughput, newest").x) == 0, "its tab is closed"
    outside.see_status(False)
    outside._drawn_s["progress"] = 0.0
    outside.add([block(1, (2.0,))])
    assert "step 1 of 10" in outside.status.state.value, "nobody sees the bar either"
    outside._drawn_s["progress"] = 0.0
    outside.see_status(True)
    assert "step 2 of 10" in outside.status.state.value


def test_predicted_is_in_the_legend_only_where_something_is(view: RunView):
    def legend() -> str:
        return view.shown.figure.layout.annotations[figure_layout.RATE_LEGEND].text

    assert "median of 1 s" in legend() and "predicted" not in legend()
    view.expect(None)
    assert "predicted" not in legend()
    view.expect(SimpleNamespace(samples_per_s=500.0, timeline=None))
    assert "predicted" in legend()
    view.use(DARK)
    assert "predicted" in legend() and DARK.muted in legend()
    view.begin("model", "*: model", 10)
    assert "predicted" not in legend()


def test_one_device_is_in_the_legend_only_where_it_was_trained(view: RunView):
    def legend() -> str:
        return view.shown.figure.layout.annotations[figure_layout.LOSS_LEGEND].text

    assert "this run" in legend() and "1 device" not in legend()
    view.show_one_device([2.0, 1.5])
    assert "1 device" in legend()
    view.use(DARK)
    assert "1 device" in legend() and DARK.ink in legend()
    view.begin("data", "*: data", 10)
    assert "1 device" not in legend(), "of a run without the check"


def test_the_loss_can_be_seen_on_a_log_scale(view: RunView):
    axis = view.shown.figure.layout.yaxis2
    assert (axis.type, axis.rangemode) == ("linear", "tozero")
    view.log_scale.value = True
    assert view.shown.figure.layout.yaxis2.type == "log"
    view.begin("model", "*: model", 10)
    assert view.shown.figure.layout.yaxis2.type == "log", "the next run, too"
    view.log_scale.value = False
    assert view.shown.figure.layout.yaxis2.type == "linear"


def test_memory_of_no_kind_is_drawn_up_to_the_peak():
    figure = live_figure.empty_figure(2, 10)
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=({"parameters": 2_000_000, "peak": 5_000_000},) * 2)])
    live_figure.show_memory(figure, history)
    other = trace(figure, "other")
    assert list(other.base) == [2.0, 2.0] and list(other.x) == [3.0, 3.0]
    assert "hatched: other" in figure.layout.annotations[2].text


def test_what_comes_first_has_its_own_number_of_steps(view: RunView):
    view.add_one_device(block(0, (3.0, 2.0), num_steps=5))
    assert (view.status.progress.value, view.status.progress.max) == (2, 5)
    view.tick(1)
    view.add([block(0, (2.0,))])
    assert (view.status.progress.value, view.status.progress.max) == (1, 10)


def test_a_failure_is_shown_once(view: RunView):
    view.fail(RuntimeError("rank 1 <died>"))
    assert "rank 1 &lt;died&gt;" in view.failure.value and "failed" in view.status.state.value


def test_a_failure_on_a_rank_is_named_after_its_own_error(view: RunView):
    stopped = Failure("CollectiveAborted", "", (), 1.0, was_stopped=True)
    view.fail(CellError("bad", failures={0: stopped, 1: Failure("ValueError", "bad", (), 0.0)}))
    assert "ValueError" in view.status.state.value and "CollectiveAborted" not in view.status.state.value
    view.fail(CellError("rank 1 died", failures={0: stopped}))
    assert "failed" in view.status.state.value and "Error" not in view.status.state.value


def test_a_new_run_starts_from_an_empty_figure(view: RunView):
    view.add([block(0, (2.0,)), RunEvent("strategy", 1, "*: model")])
    view.show_one_device([1.0, 2.0])
    shown = view.shown
    view.begin("model", "*: model", 50)
    assert view.shown is shown, "one widget, 5 MB, for all runs"
    figure = view.shown.figure
    for name in ("throughput, newest", "this run, newest", "1 device"):
        assert len(trace(figure, name).x) == 0
    assert list(figure.layout.xaxis.range) == [0, 20] and len(figure.layout.shapes) == 0


def test_the_theme_changes_colours_and_nothing_else(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,), memory=MEMORY), spans(0), spans(1), RunEvent("strategy", 1, "*: model")])
    view.link._receive(None, {"event": "theme", "value": "dark"}, None)
    assert trace(view.shown.figure, "median").line.color == DARK.ink
    assert trace(view.shown.figure, "parameters").marker.color == DARK.memory["parameters"]
    assert not any(LIGHT.muted in title for title in titles(view.shown.figure))
    assert len(trace(view.shown.figure, "throughput, newest").x) == 1 and len(view.shown.figure.layout.shapes) == 2
    assert len(trace(view.shown.figure, "forward, measured").x) == 2


def test_an_unknown_number_of_steps_needs_no_progress_bar():
    view = RunView(2)
    view.begin("own loop", "", 0)
    view.add([block(0, (2.0,), num_steps=0)])
    assert view.status.progress.layout.visibility == "hidden" and "step 1<" in view.status.state.value


def test_one_device_is_seen_while_it_trains_before_the_run(view: RunView):
    view.tick(1)
    view.add_one_device(block(0, (3.0, 2.0), time_s=(0.1,), boxing_s=(0.0,)))
    assert "one device first: <b>step 2 of 10<" in view.status.state.value
    assert "20 %</b> 1\u202f000 samples/s, 800 ms left" in view.status.elapsed.value
    assert list(trace(view.shown.figure, "1 device").y) == [3.0, 2.0] and view.status.progress.value == 2
    view.tick(1)
    view.add_one_device(block(2, (1.0,), time_s=(0.1,), boxing_s=(0.0,)))
    assert list(trace(view.shown.figure, "1 device").y) == [3.0, 2.0, 1.0]
    view.tick(1)
    view.add([block(0, (3.0,))])
    assert "step 1 of 10" in view.status.state.value and view.status.progress.value == 1


def test_the_throughput_has_a_median_line(view: RunView):
    view.tick(1)
    view.add([block(0, (2.0,) * 5), block(5, (2.0,), time_s=(0.01, 0.01))])
    assert max(trace(view.shown.figure, "throughput, newest").y) == 10_000
    assert list(trace(view.shown.figure, "median, newest").y) == [500] * 6
    assert "500 samples/s now" in titles(view.shown.figure)[0]
    view.end("ended", "last report: step 6")
    assert "500 samples/s at the end" in titles(view.shown.figure)[0]


def test_other_values_are_curves_below_the_figure(view: RunView):
    view.tick(1)
    view.add([replace(block(0, (2.0, 2.0)), values={"gradient_norm": ((0, 3.0), (1, 5.0)), "<own>": ((1, math.inf),)})])
    shown = view.values.value
    assert "gradient norm <b>5</b>" in shown and "from 3 to 5" in shown and "&lt;own&gt; <b>inf</b>" in shown
    assert shown.count("<svg") == 1, "there is no place for infinity"
    assert "gradient norm" in view.static_html()
    view.begin("data", "*: data", 10)
    assert view.values.value == ""


def test_the_gpus_of_all_ranks_are_one_line(view: RunView):
    view.expect(SimpleNamespace(samples_per_s=500.0, timeline=None, flops_per_sample=1e9))
    first = {"busy": 0.9, "used": 30e9, "total": 80e9, "pool": 20e9, "peak_flops_per_s": 1e12}
    view.tick(1)
    view.add([replace(block(0, (2.0,)), devices=(first, {**first, "busy": 0.0, "used": 34e9}))])
    in_words = (
        "0 to 90 % busy, 30.0 GB to 34.0 GB of 80.0 GB in use, 20.0 GB reserved by a rank, 25 % of their peak flop/s"
    )
    assert view.devices.value == f"GPUs: {in_words}"
    view.tick(1)
    view.add([replace(block(1, (2.0,)), devices=({**first, "gpu": 7.0}, {**first, "gpu": 7.0, "pool": 4e9}))])
    in_words = "90 % busy, 30.0 GB of 80.0 GB in use, 4.00 GB to 20.0 GB reserved by a rank, 50 % of its peak flop/s"
    assert view.devices.value == f"GPU: {in_words}", "which two ranks share"
    view.tick(1)
    view.add([replace(block(2, (2.0,)), devices=({"used": 3e9, "total": 80e9}, {}))])
    assert view.devices.value == "GPUs: 3.00 GB of 80.0 GB in use", "without NVML, of a GPU that no table has"
    view.begin("data", "*: data", 10)
    assert view.devices.value == ""
