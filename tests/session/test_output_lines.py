"""A rank's stream as lines, and progress bars while they move."""

import io
import sys
import time
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from workbench.session.output.lines import PERIOD_S, UNFINISHED_S, LineSplitter, Unfinished
from workbench.session.output.start_progress import progress_stream


def test_splitter_lines_carriage_returns_and_rest():
    splitter = LineSplitter()
    assert splitter.feed("one\ntw") == ["one"]
    assert splitter.feed("o\nthree") == ["two"]
    assert splitter.rest() == ["three"]
    assert splitter.rest() == []
    assert splitter.feed(" 10%\r 50%\r100%\nnext\r\n") == ["100%", "next"]


def test_progress_bar_keeps_one_line_in_memory():
    splitter = LineSplitter()
    for percent in range(10_000):
        splitter.feed(f"\r{percent} of 10000")
    assert len(splitter._partial) < 100
    assert splitter.rest() == ["9999 of 10000"]


@pytest.mark.timed
@pytest.mark.parametrize("end", ["", "\n", "\nand then"])
@pytest.mark.parametrize("update", ["\rstep loss 0.1234", "\nouter\rinner\x1b[A", "\rstep\n"])
def test_time_grows_with_the_text(update, end):
    """200 updates in one piece took 3 s, and 1000 took minutes, in which no interrupt helped."""

    def time_s(num_updates):
        text, times = update * num_updates + end, []
        for _ in range(5):
            start = time.thread_time()
            LineSplitter().feed(text)
            times.append(time.thread_time() - start)
        return min(times)

    for few in (20, 1000):
        # In proportion it is 30 times as much, by the square 900 times. Beside other work 10 times was 58 times once.
        assert time_s(30 * few) < 200 * time_s(few) + 0.001


def test_the_end_of_a_bar_counts_when_something_follows():
    splitter = LineSplitter()
    assert splitter.feed("before\n 10%\r100%\n") == ["before"]
    assert splitter.unfinished == "100%"
    assert splitter.feed("after\n") == ["100%", "after"]
    assert splitter.feed("\r100%\n") == [] and splitter.rest() == ["100%"] and splitter.unfinished == ""


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_a_bar_inside_a_bar_is_no_flood(size):
    """What tqdm writes for two loops, in pieces of any size."""
    written = io.StringIO()
    for _ in tqdm(range(5), "outer", file=written, mininterval=0):
        for _ in tqdm(range(20), "inner", file=written, mininterval=0, leave=False, position=1):
            pass
    text = written.getvalue() + "done\n"
    assert text.count("\n") > 100
    splitter = LineSplitter()
    lines = [line for start in range(0, len(text), size) for line in splitter.feed(text[start : start + size])]
    assert lines[-1].endswith("done") and len(lines) < 20, lines
    assert any("outer: 100%" in line for line in lines)


class TestUnfinished:
    def test_shows_what_stands_for_a_while_and_again_when_it_has_changed(self):
        unfinished = Unfinished()
        assert unfinished.take([(0, "10%")], 0.0) is None
        assert unfinished.wakeup() == UNFINISHED_S
        assert unfinished.take([(0, "20%"), (1, "20%")], UNFINISHED_S) == [((0,), "20%")]
        assert unfinished.take([(0, "20%"), (1, "20%")], UNFINISHED_S + 0.01) is None
        assert unfinished.take([(0, "30%"), (1, "30%")], 2 * UNFINISHED_S) == [((0, 1), "30%")]

    def test_is_shown_a_few_times_a_second(self):
        unfinished = Unfinished()
        shown = [unfinished.take([(0, f"{step} of 1000")], step / 1000) for step in range(1000)]
        assert 3 <= sum(lines is not None for lines in shown) <= 1 + (1 - UNFINISHED_S) / PERIOD_S
        unfinished.take([(0, "late")], 1.0)
        assert unfinished.wakeup() is not None

    def test_is_taken_away_when_nothing_is_unfinished(self):
        unfinished = Unfinished()
        assert unfinished.take([], 0.0) is None
        unfinished.take([(0, "x")], 0.0)
        unfinished.take([(0, "x")], 1.0)
        assert unfinished.take([], 2.0) == []
        assert unfinished.take([], 3.0) is None
        assert unfinished.wakeup() is None


@pytest.mark.parametrize(("shell", "stream"), [(SimpleNamespace(kernel=object()), "stdout"), (None, "stderr")])
def test_progress_is_no_error_in_a_notebook(monkeypatch, shell, stream):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress_stream() is getattr(sys, stream)
