"""The widget of finished runs: sort, filter, hide, rename, choose a baseline, load runs of other days, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets

from workbench.core.metrics import RunRecord
from workbench.core.seeds import groups, over_seeds, with_seed
from workbench.core.segments import by_strategy
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.comparison import NO_STRATEGY
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui.assets import asset, element
from workbench.ui.controls import LateBox, bar, button, html, label, on_value
from workbench.ui.failures import guarded
from workbench.ui.number_text import three_digits
from workbench.ui.page_link import Downloads
from workbench.ui.runs.comparable import place_of, task_of
from workbench.ui.runs.render_table import below_html, comparison_html, table_style
from workbench.ui.runs.report import report_html
from workbench.ui.runs.table_rows import (
    COLUMNS,
    Row,
    common_settings,
    filter_rows,
    key_of,
    rows_csv,
    run_rows,
    sorted_rows,
    with_fronts,
    with_own_keys,
)

ONE_DEVICE = "1 device"
_FILTER_TIP = "a part of a name, or conditions: memory and boxed in MB, step in s, bubble and error in %"
_TYPES = {"csv": "text/csv", "json": "application/json", "html": "text/html"}


class RunsPage(Downloads):
    """Shows ``page``, the HTML of table and scatter, and passes the user's actions to one handler."""

    _esm = asset("download.js") + asset("controls.js") + asset("runs.js")

    page = traitlets.Unicode("").tag(sync=True)

    def __init__(self, on_event: Callable[[dict[str, Any]], None], **traits: Any) -> None:
        super().__init__(**traits)
        self._on_event = on_event
        self.on_msg(guarded(lambda _widget, content, _buffers: self._on_event(content)))


class RunTable:
    """The comparison. ``box`` is its widget. Runs that differ in their seed only are one row, while ``means`` is on.
    ``changed`` is called after each change of what it shows.

    Args:
        opened: (a run) -> loads its strategy into the panel. None: no such button.
        again: (a run) -> runs its strategy once more.
        saved: the runs of other days; new names are stored there.
        limit_bytes: memory of a rank, drawn as a line.
        part: (a run) -> finds where it parts from one device. None: no such button.
        another: (a run) -> runs its strategy with another seed. None: no such button.
    """

    def __init__(
        self,
        opened: Callable[[RunRecord], None] | None = None,
        again: Callable[[RunRecord], None] | None = None,
        saved: SavedRuns | None = None,
        limit_bytes: float | None = None,
        part: Callable[[RunRecord], None] | None = None,
        another: Callable[[RunRecord], None] | None = None,
    ) -> None:
        self.runs: list[RunRecord] = []
        self._whole: dict[str, RunRecord] = {}  # by the key of a part
        self._truths: dict[Any, RunRecord] = {}  # by task, place and seed
        self._groups: dict[str, list[RunRecord]] = {}  # by the key of a row, its runs; those on one device last
        self._every: list[RunRecord] = []  # the records of the rows
        self.sort, self.ascending = "samples_per_s", False
        self.selected = self.baseline = ""
        self.hidden: set[str] = set()
        self.names: dict[str, str] = {}
        self.changed: Callable[[], None] = lambda: None
        self._opened, self._again, self._part, self._another = opened, again, part, another
        self.answer = html("", "wb-quiet", "wb-answer")
        self._answered: tuple[str, ...] = ()  # the selected row and all rows, when there was an answer
        self.saved = saved if saved is not None else SavedRuns()
        self.limit_bytes = limit_bytes
        self.page = RunsPage(self._on_event)
        self._make_controls()
        style = html(table_style())
        self._parts = (style, self._title_bar, self._bar, self._loader, self.answer, self.page)
        self.box = LateBox((self._empty, *self._parts))
        self.box.add_class("wb-run-table")
        self.refresh()

    def _make_controls(self) -> None:
        self.facts = html()
        self._title_bar = bar(html('<span class="wb-title">Comparison</span>'), self.facts)
        self.open_button = button("Open in panel", lambda: self._with_selected(self._opened))
        self.again_button = button("Run again", lambda: self._with_selected(self._again))
        self.seed_button = button("Another seed", lambda: self._with_selected(self._another))
        self.means = widgets.Checkbox(True, description="mean over seeds", indent=False)
        self.means.tooltip = "one row for runs that differ in their seed only: mean and standard deviation"
        on_value(self.means, lambda change: self.refresh())
        self.part_button = button("Find the first difference", self._find_part)
        self.hide_button = button("Hide", self.hide, tooltip="leave the selected run out of the table")
        self.show_button = button("Show hidden", self.show_all)
        self.baseline_field = widgets.Dropdown(options=[(ONE_DEVICE, "")], layout={"width": "130px"})
        on_value(self.baseline_field, lambda change: self.set_baseline(change["new"] or ""))
        self.filter_field = widgets.Text(placeholder="e.g. memory < 300", layout={"width": "150px"})
        on_value(self.filter_field, lambda change: self.refresh())
        exports = bar(*(self._export_button(kind) for kind in ("csv", "html", "json")), css=("wb-group",))
        self.load_button = button("Load runs\u2026", self._toggle_loader)
        first = [self.open_button] if self._opened else []
        first += [self.again_button] if self._again else []
        first += [self.seed_button] if self._another else []
        first += [self.part_button] if self._part else []
        self._bar = bar(
            *first,
            self.hide_button,
            self.show_button,
            self.means,
            *(
                bar(label("baseline"), self.baseline_field, css=("wb-field",)),
                bar(label("filter"), self.filter_field, css=("wb-field",)),
            ),
            html("", "wb-space"),
            bar(label("export"), exports, self.load_button, css=("wb-field",)),
        )
        self.saved_list = widgets.SelectMultiple(options=[], rows=8, layout={"width": "620px"})
        self.add_button = button("Add to the table", self._add_chosen)
        self._loader = bar(self.saved_list, self.add_button, css=("wb-bar", "wb-loader"))
        self._loader.layout.display = "none"
        none = '<span class="wb-quiet">No finished runs yet: each run that ends is a row here.</span>'
        self._empty = bar(html(none), self.load_button)

    def _export_button(self, kind: str) -> widgets.Button:
        return button(kind.upper(), lambda: self.page.download(f"comparison.{kind}", self.exported(kind), _TYPES[kind]))

    # ---- display --------------------------------------------------------------------------------------------

    def add(
        self, runs: Iterable[RunRecord], truths: Sequence[RunRecord] = (), selected: RunRecord | None = None
    ) -> None:
        """Append new runs, one row per strategy. Records that the table has are left out; one of a run that had not
        finished is replaced. Runs on one device, and those in ``truths``, are references: the newest of each task,
        place and seed. ``selected`` is one of the runs, whose last row is marked.
        """
        listed = list(runs)
        one_device = [run for run in listed if run.strategy == NO_STRATEGY]
        for run in [run for run in listed if run.strategy != NO_STRATEGY]:
            self.runs = [part for part in self.runs if not _is_earlier(part, run)]
            known = {key_of(part) for part in self.runs}
            parts = [part for part in by_strategy([run]) if not (part.run_id and key_of(part) in known)]
            if not run.run_id and self._key_of_whole(run) is not None:
                continue
            parts = with_own_keys(parts, known)
            self.runs += parts
            self._whole |= {key_of(part): run for part in parts}
        for truth in (*truths, *one_device):
            key = task_of(truth), place_of(truth), truth.settings.get("seed")
            if truth.started >= self._truths.get(key, truth).started:
                self._truths[key] = truth
        if selected is not None:
            self.selected = self._key_of_whole(selected) or ""
        self.refresh()

    def _key_of_whole(self, run: RunRecord) -> str | None:
        """The key of the last row of a record that was added; None if it was not."""
        return next((key for key, whole in reversed(self._whole.items()) if whole is run or whole == run), None)

    @property
    def truth(self) -> RunRecord | None:
        """The run on one device, over its seeds; None without one."""
        return next(iter(over_seeds(self._truths.values())), None)

    @property
    def rows(self) -> list[Row]:
        """All rows that are not hidden and meet the filter, in the table's order."""
        rows = self._sorted()
        with suppress(ValueError):
            rows = filter_rows(rows, self.filter_field.value)
        return with_fronts(rows)

    def _sorted(self) -> list[Row]:
        truths = [key_of(truth) for truth in self._truths.values()]
        rows = run_rows(self._every, self.baseline, self.names, truths)
        return sorted_rows([row for row in rows if row.key not in self.hidden], self.sort, self.ascending)

    def refresh(self) -> None:
        """Show the table in its present state."""
        runs, truths = self.runs, list(self._truths.values())
        is_apart = not self.means.value
        found = [[run] for run in [*runs, *truths]] if is_apart else [*groups(runs), *groups(truths)]
        self._groups = {key_of(group[0]): group for group in found}
        self._every = [over_seeds(group)[0] for group in found]
        if not self._every:
            self.box.children = (self._empty, self._loader)
            return
        self.box.children = self._parts
        rows = {key_of(run): key for key, group in self._groups.items() for run in group}
        self.selected = rows.get(self.selected, "")
        if self.answer.value and self._answered != self._row_keys():
            self.answer.value = ""
        self.page.page = self._page_html()
        self.changed()
        self._show_controls()
        self.facts.value = element("span", text=common_settings(runs or truths), css="wb-quiet")

    def _show_controls(self) -> None:
        truths = list(self._truths.values())
        others = [run for run in self._every if not any(key_of(run) == key_of(truth) for truth in truths)]
        options = [(ONE_DEVICE, ""), *((self.names.get(key_of(run), run.name), key_of(run)) for run in others)]
        self.baseline = self.baseline if self.baseline in [key for _, key in options] else ""
        if list(self.baseline_field.options) != options:
            with self.baseline_field.hold_trait_notifications():
                self.baseline_field.options = options
                self.baseline_field.value = self.baseline
        chosen = next((run for run in self._every if key_of(run) == self.selected), None)
        for each in (self.open_button, self.again_button, self.seed_button):
            each.disabled = all(key_of(run) != self.selected for run in others)
            each.tooltip = "select a run first" if each.disabled else ""
        if not self.seed_button.disabled:
            self.seed_button.tooltip = "train this strategy with other weights and another order of the samples"
        self.means.layout.display = "" if len(groups(self.runs)) < len(self.runs) else "none"
        self.part_button.disabled = chosen is None or chosen.equal is not False
        where = "find the first layer and function that differ from one device"
        self.part_button.tooltip = "select a run marked \u2717 first" if self.part_button.disabled else where
        self.hide_button.disabled = chosen is None
        self.show_button.layout.display = "" if self.hidden else "none"
        self.show_button.description = f"Show hidden ({len(self.hidden)})"
        try:
            filter_rows([], self.filter_field.value)
            wrong = ""
        except ValueError as error:
            wrong = str(error)
        self.filter_field.tooltip = wrong or _FILTER_TIP
        (self.filter_field.add_class if wrong else self.filter_field.remove_class)("wb-wrong")

    def static_html(self) -> str:
        """The table and the scatter for readers without a kernel."""
        if not self._every:
            return ""
        return element("div", table_style(), self._page_html(), css="wb-comparison")

    def _page_html(self) -> str:
        rows = self.rows
        below = below_html(rows, self._every, self.selected, self._groups)
        return comparison_html(rows, self.sort, self.ascending, self.selected, self.limit_bytes, below)

    # ---- actions of the user ---------------------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, value = event.get("event"), str(event.get("value", ""))
        if kind == "sort":
            self.sort_by(value)
        elif kind == "select":
            self.select(value)
        elif kind == "rename":
            self.rename(value, str(event.get("name", "")))
        elif kind == "part":
            self.selected = value
            self.refresh()
            self._find_part()

    def show_answer(self, text: str) -> None:
        """Show where a run parts from one device, until another row is selected or the rows are others."""
        self._answered = self._row_keys()
        self.answer.value = element("div", text=text)

    def _row_keys(self) -> tuple[str, ...]:
        return self.selected, *self._groups

    def sort_by(self, key: str) -> None:
        """Sort by a column, its better end first; a second call reverses the order."""
        column = next((column for column in COLUMNS if column.key == key), None)
        if column is not None:
            self.ascending = not self.ascending if key == self.sort else column.ascending
            self.sort = key
            self.refresh()

    def select(self, key: str) -> None:
        """Mark a run in table and scatter."""
        self.selected = "" if key == self.selected else key
        self.refresh()

    def rename(self, key: str, name: str) -> None:
        """Rename a run, also on disk if it is kept."""
        for number, run in enumerate(self._groups.get(key, ())):
            own = with_seed(name, run.settings["seed"], -1) if number else name
            self.names[key_of(run)] = own
            if run.run_id in self.saved.ids():
                try:
                    self.saved.rename(run.run_id, own)
                except OSError as error:
                    self.show_answer(f"{own!r} is the name in this table only, its file cannot be written: {error}")
        self.refresh()

    def set_baseline(self, key: str) -> None:
        """Compute speed-ups over this run; "" is one device."""
        self.baseline = key
        self.refresh()

    def hide(self) -> None:
        """Leave the selected run out."""
        if self.selected:
            self.hidden.add(self.selected)
            self.selected = ""
            self.refresh()

    def show_all(self) -> None:
        """Show all hidden runs."""
        self.hidden.clear()
        self.refresh()

    def exported(self, kind: str) -> str:
        """The shown rows as ``"csv"``, ``"json"`` (complete records) or ``"html"``, a page that stands alone."""
        rows = self.rows
        if kind == "csv":
            return rows_csv(rows)
        truths = list(self._truths.values())
        result = CompareResult(truths[0] if truths else None, self._whole_runs(rows), more_baselines=truths[1:])
        if kind == "json":
            return result.to_json()
        if kind == "html":
            return report_html(result)
        raise ValueError(f"export {kind!r}: there are {', '.join(_TYPES)}.")

    def _whole_runs(self, rows: Iterable[Row]) -> list[RunRecord]:
        """The runs of these rows, under their names in the table."""
        found: dict[int, RunRecord] = {}
        shown = self._groups
        for part in (part for row in rows for part in shown[row.key]):
            run = self._whole.get(key_of(part))
            if run is not None:
                name = run.name if run.segments else self.names.get(key_of(part), run.name)
                found.setdefault(id(run), replace(run, name=name))
        return list(found.values())

    def export(self, path: str) -> Path:
        """Write a file in the format of its ending: .csv, .json or .html.

        Raises:
            ValueError: another ending.
        """
        target = Path(path)
        content = self.exported(target.suffix.lstrip(".").lower())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        return target

    def _toggle_loader(self) -> None:
        hidden = self._loader.layout.display == "none"
        if hidden:
            there = [*(self._whole[key_of(run)] for run in self.runs), *self._truths.values()]
            known = {(run.run_id, run.error) for run in there}  # one that had not finished may have, by now
            new = [run for run in self.saved if (run.run_id, run.error) not in known]
            self.saved_list.options = [(_saved_text(run), run.run_id) for run in reversed(new)]
        self._loader.layout.display = "" if hidden else "none"

    def _add_chosen(self) -> None:
        self.add(self.saved[run_id] for run_id in self.saved_list.value)
        self._loader.layout.display = "none"

    def _with_selected(self, action: Callable[[RunRecord], None] | None) -> None:
        group = self._groups.get(self.selected)
        if group and action is not None:
            action(group[0])

    def _find_part(self) -> None:
        unequal = [run for run in self._groups.get(self.selected, ()) if run.equal is False]
        if unequal and self._part is not None:
            self._part(unequal[0])


def _is_earlier(part: RunRecord, run: RunRecord) -> bool:
    """Whether a row is of the same run, and from before its end."""
    return bool(run.run_id) and part.run_id == run.run_id and part.error not in (None, run.error)


def _saved_text(run: RunRecord) -> str:
    model = run.settings.get("model", "")
    state = "not finished" if run.error else f"{three_digits(run.samples_per_s)} samples/s"
    return f"{run.started[:16].replace('T', ' ')}  {run.name}  {model}  {run.num_ranks} ranks  {state}"
