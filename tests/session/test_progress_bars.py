"""Progress bars: one for all ranks, in the colour of how it ended."""

from contextlib import nullcontext

import pytest

from workbench.errors import CellError
from workbench.session.output.progress_bars import MAX_ENDED, PERIOD_S, Bars, as_html, as_text
from workbench.session.protocol import Bar


def bar(done, number=0, state="runs", name="epochs", total=10, depth=0):
    return Bar(number, name, f"{name}: {10 * done}%", f" {done}/{total}", done, total, depth, state)


def merged(*of_ranks, ranks=(0, 1)):
    bars = Bars(ranks)
    for rank, each in of_ranks:
        bars.take(rank, each)
    return bars.merged()


def test_ranks_that_are_equally_far_are_one_bar():
    (found,) = merged((0, bar(4)), (1, bar(4)))
    assert (found.left, found.right, found.fraction, found.state) == ("epochs: 40%", " 4/10", 0.4, "runs")


def test_the_slowest_rank_is_shown_and_the_others_are_told():
    (found,) = merged((0, bar(7)), (1, bar(4)), (2, bar(7)), ranks=(0, 1, 2))
    assert found.fraction == 0.4 and found.right == " 4/10  (rank 1; ranks 0,2: 7)"


def test_ranks_that_have_no_such_bar_are_told():
    assert merged((1, bar(4)))[0].right == " 4/10  (rank 1)"


@pytest.mark.parametrize(
    ("states", "merged_state"),
    [
        (("finished", "finished"), "finished"),
        (("finished", "runs"), "runs"),
        (("left", "finished"), "left"),
        (("failed", "runs"), "failed"),
        (("failed", "finished"), "failed"),
    ],
)
def test_the_state_of_all(states, merged_state):
    (found,) = merged(*((rank, bar(10, state=state)) for rank, state in enumerate(states)))
    assert found.state == merged_state


def test_bars_that_ranks_call_differently_stay_apart():
    assert [each.left for each in merged((0, bar(1, name="a")), (1, bar(2, name="b")))] == ["a: 10%", "b: 20%"]


def test_an_inner_bar_that_is_not_kept_goes_when_it_has_ended_on_all_ranks():
    outer, inner = bar(1), bar(3, number=1, name="batches", depth=1)
    assert [each.depth for each in merged((0, outer), (0, inner), ranks=(0,))] == [0, 1]
    gone = bar(10, number=1, name="batches", state="gone")
    assert len(merged((0, outer), (0, gone), (1, inner))) == 2
    assert len(merged((0, outer), (0, gone), (1, gone))) == 1


def test_of_many_that_are_finished_the_last_are_shown():
    found = merged(*((0, bar(10, number=number, state="finished")) for number in range(MAX_ENDED + 5)), ranks=(0,))
    assert len(found) == MAX_ENDED + 1 and found[0].right == "5 more bars, finished"


def test_it_is_drawn_when_it_has_changed_and_not_too_often():
    bars = Bars((0,))
    assert bars.due(1.0) is None and bars.wakeup() is None
    bars.take(0, bar(1))
    assert bars.due(1.0) is not None and bars.due(2.0) is None
    bars.take(0, bar(2))
    assert bars.due(1.0 + PERIOD_S / 2) is None and bars.wakeup() == pytest.approx(1.0 + PERIOD_S)
    assert bars.due(1.0 + PERIOD_S / 2, final=True)[0].fraction == 0.2


def test_what_is_drawn():
    failed = merged((0, bar(4, state="failed", name="<b>")), ranks=(0,))
    assert as_text(failed) == "<b>: 40%|████████            | 4/10 ✗"
    drawn = as_html(failed)
    assert 'role="progressbar" aria-valuenow="40"' in drawn and "&lt;b&gt;" in drawn and "<b>" not in drawn
    assert "error-color" in drawn and "error-color" not in as_html(merged((0, bar(10, state="finished"))))
    assert as_html([]) == ""


ENDINGS = {
    "for i in tqdm(range(5), 'x'): pass": "finished",
    "for i in tqdm(range(5), 'x'):\n    if i == 2: break": "left",
    "for i in tqdm(range(5), 'x'):\n    if i == 2: 1 / 0": "failed",
    "with tqdm(total=5, desc='x') as bar:\n    bar.update(2)\n    1 / 0": "failed",
    "bar = tqdm(total=5, desc='x')\nbar.update(2)\n1 / 0": "failed",
    "bar = tqdm(total=5, desc='x')\nbar.update(5)\nbar.close()": "finished",
    "for i in tqdm(iter(range(5)), 'x'): pass": "finished",
    "_ = (lambda bar: [bar.update(1) for _ in range(40)])(tqdm(total=40, desc='x'))": "finished",
    "bar = tqdm(total=5, desc='x')\nfor _ in range(5): bar.update(1)": "runs",
}


@pytest.mark.engines
class TestEngines:
    def shown(self, session, code):
        """The last drawing, all lines of output, and how often something was drawn."""
        drawn, lines = [], []
        with pytest.raises(CellError, match="ZeroDivisionError") if "1 / 0" in code else nullcontext():
            session.run_cell(code, show=lambda name, block: lines.append((name, block.content)), show_bars=drawn.append)
        return drawn[-1], lines, len(drawn)

    @pytest.mark.parametrize("code", ENDINGS)
    def test_how_it_ended(self, session, code):
        (found,), lines, _ = self.shown(session, f"from tqdm.auto import tqdm\n{code}")
        assert (found.state, found.left.split(":")[0], lines) == (ENDINGS[code], "x", [])
        assert ENDINGS[code] not in ("finished", "runs") or found.fraction in (1.0, None)

    @pytest.mark.parametrize("code", ENDINGS)
    def test_a_later_cell_that_fails_does_not_show_it(self, session, code):
        with pytest.raises(CellError) if "1 / 0" in code else nullcontext():
            session.run_cell(f"from tqdm.auto import tqdm\n{code}")
        drawn = []
        with pytest.raises(CellError, match="ZeroDivisionError"):
            session.run_cell("1 / 0", show_bars=drawn.append)
        assert not any(drawn)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook", "tqdm.std"])
    def test_every_tqdm_is_one_bar_that_moves(self, session, module):
        code = f"import time\nfrom {module} import tqdm, trange\nfor _ in trange(4): time.sleep(0.15)"
        (found,), lines, num_drawn = self.shown(session, code)
        assert (found.fraction, lines) == (1.0, []) and num_drawn >= 3

    def test_nested_and_what_is_printed_meanwhile(self, session):
        code = """
from tqdm.auto import tqdm, trange
for epoch in trange(2, desc="epochs"):
    for _ in trange(3, desc="batches", leave=False): pass
    tqdm.write(f"epoch {epoch}")
"""
        found, lines, _ = self.shown(session, code)
        assert [each.left for each in found] == ["epochs: 100%"]
        assert lines == [("stdout", "epoch 0"), ("stdout", "epoch 1")]

    def test_where_nothing_is_drawn_it_is_a_line_at_the_end(self, session):
        result = session.run("from tqdm import tqdm\nfor _ in tqdm(range(3), 'x'): pass\nprint('after')")
        assert result.text.splitlines()[0] == "[all] after" and "x: 100%|████" in result.text.splitlines()[1]

    def test_a_bar_into_a_file_of_the_users_stays_there(self, session):
        code = "import io\nfrom tqdm import tqdm\nfile = io.StringIO()\nfor _ in tqdm(range(3), file=file): pass"
        session.run(code)
        assert all("100%" in text for text in session.run("file.getvalue()").values)
