"""One notebook open in a real page: what tests do there, and what they wait for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.timeouts import PAGE_TIMEOUT_S

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
WIDE = {"width": 1680, "height": 1400}
"""Of the window in which notebooks are opened."""
IDLE = """() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'
    && document.querySelectorAll('.jp-Cell').length > 1"""
SHOWN_PATH = "window.jupyterapp.shell.currentWidget?.context?.path"

OWN_ERRORS = {"lab": (), "notebook": ("Cannot read properties of undefined (reading 'schema')",)}
"""What a front end complains about by itself, with a notebook of plain numbers, too (Notebook 7.6.5)."""
OF_THE_SERVER = re.compile(r"https?://[^/]+/(api|lab/api|lsp|ipyparallel)/")
"""What front ends ask their server by themselves, again and again; nothing of ours is loaded from there."""


@dataclass
class LabPage:
    """One notebook open in JupyterLab or Notebook 7, with everything that its console complained about."""

    page: Any
    app: str = "lab"
    errors: list[str] = field(default_factory=list)
    server_errors: list[str] = field(default_factory=list)
    """Answers for which the server of a busy machine was too late."""
    was_reloaded: bool = False

    def __post_init__(self) -> None:
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self._complain(str(error)))

    def _hear(self, said: Any) -> None:
        if said.type != "error":
            return
        address = said.location.get("url", "")
        if "status of 5" in said.text and OF_THE_SERVER.match(address):
            self.server_errors.append(f"{said.text}: {address}")
        else:
            self._complain(f"{said.text}: {address}" if said.text.startswith("Failed to load") else said.text)

    def _complain(self, text: str) -> None:
        if text not in OWN_ERRORS[self.app]:
            self.errors.append(text)

    # ---- the notebook ---------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Go there and wait for the kernel."""
        self.page.goto(url)
        self.page.wait_for_function(IDLE)

    def shows(self, name: str) -> bool:
        """Whether this notebook is open; one that was loaded again does not count, as it may lack widgets."""
        return not self.was_reloaded and bool(self.page.evaluate(f"path => {SHOWN_PATH} === path", name))

    def show_notebook(self, name: str) -> None:
        """Open a notebook in JupyterLab as it is loaded, and wait for the kernel; the page is as after `open`.

        A notebook that is open already goes on with its kernel, and shows no outputs.
        """
        self.errors.clear()
        self.server_errors.clear()
        self.was_reloaded = False
        self.page.set_viewport_size(WIDE)
        script = """path => {
            const { shell, commands } = window.jupyterapp;
            shell.expandLeft();
            for (const cell of shell.currentWidget?.content?.widgets ?? []) cell.model.outputs?.clear();
            return commands.execute('docmanager:open', { path }).then(() => 1);
        }"""
        self.page.evaluate(script, name)
        self.page.wait_for_function(f"path => {SHOWN_PATH} === path", arg=name)
        self.page.wait_for_function(IDLE)

    def leave_notebook(self) -> None:
        """Close the notebook without a question, and keep JupyterLab."""
        script = """() => {
            const shown = window.jupyterapp.shell.currentWidget;
            return shown.context.save().then(() => { shown.dispose(); return 1; });
        }"""
        self.page.evaluate(script)
        self.page.wait_for_function(f"() => !{SHOWN_PATH}")

    def reload(self) -> None:
        """Save and load the page again, once the kernel is idle; it lives on."""
        self.page.wait_for_function(IDLE)
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save').then(() => 1)")
        self.page.reload()
        self.was_reloaded = True
        self.page.wait_for_function(IDLE)

    def run_cells(self, last: int) -> None:
        """Run the cells up to number ``last`` (counted from 0, text cells too)."""
        self._execute("notebook:run-cell", 0, last)

    def run_cell(self, first: int, last: int | None = None) -> None:
        """Run this cell, or these, and none before them."""
        self._execute("notebook:run-cell", first, first if last is None else last)

    def _execute(self, command: str, first: int, last: int) -> None:
        # A command's promise ends with the run; handing it out would block until then.
        script = """([command, first, last]) => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = first;
            notebook.deselectAll();
            for (let n = first; n <= last; n++) notebook.select(notebook.widgets[n]);
            window.jupyterapp.commands.execute(command);
            return 1;
        }"""
        self.page.evaluate(script, [command, first, last])

    def show(self, cell: int, selector: str, last: int | None = None) -> None:
        """Run this cell, or these, anew and wait for what they show, as the first reader of the page sees it.

        Nothing that an earlier test did is left: what the cells showed is gone, the window is wide, the theme light.
        """
        self.page.set_viewport_size(WIDE)
        if self.page.locator(DARK_PAGE).count():
            self.dark(False)
        cells = [cell, cell if last is None else last]
        self.page.evaluate(MARK_OUTPUTS, cells)
        self.run_cell(*cells)
        self.page.wait_for_function("() => !document.querySelector('[data-shown-before]')")
        self.wait_for_output(selector)
        self.wait_for_kernel()

    def wait_for_output(self, selector: str) -> None:
        """Wait for something that a cell shows; an error in a cell fails at once, with its text."""
        from playwright.sync_api import TimeoutError as TookTooLong

        error = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']"
        try:
            self.page.wait_for_selector(f"{selector}, {error}")
        except TookTooLong:
            raise AssertionError(
                f"{selector}: not seen after {PAGE_TIMEOUT_S} s; the page complained of {self.errors}, the kernel and "
                f"the cells: {self.page.evaluate(CELLS_OF_PAGE, selector)}"
            ) from None
        shown = self.page.locator(error)
        assert shown.count() == 0, shown.first.inner_text()

    def dark(self, on: bool) -> None:
        """Change the theme."""
        theme = "JupyterLab Dark" if on else "JupyterLab Light"
        script = "theme => { window.jupyterapp.commands.execute('apputils:change-theme', {theme}); return 1 }"
        self.page.evaluate(script, theme)
        self.page.wait_for_selector(f"body[data-jp-theme-light='{'false' if on else 'true'}']", state="attached")
        self.settle()

    def close_sidebar(self) -> None:
        """Leave the whole width to the notebook."""
        script = """() => {
            const { shell, commands } = window.jupyterapp;
            if (!shell.leftCollapsed) commands.execute('application:toggle-left-area');
        }"""
        self.page.evaluate(script)
        self.page.wait_for_function("() => window.jupyterapp.shell.leftCollapsed")

    def screenshot(self, name: str, locator: Any) -> None:
        """Keep a picture in docs/images, if pictures are wanted: tests change no file."""
        if os.environ.get("WORKBENCH_SCREENSHOTS") == "1":
            self.page.mouse.move(0, 0)  # what shows under the mouse only is not in the picture
            self.settle()  # it fades
            locator.screenshot(path=IMAGES / name)

    # ---- the panel ------------------------------------------------------------------------------------------------

    def button(self, text: str) -> Any:
        """A button of the panel."""
        return self.page.locator(".wb-panel button", has_text=text).first

    @property
    def run_button(self) -> Any:
        """The button that starts a run."""
        return self.page.locator(".wb-panel button.wb-primary", has_text="Run").first

    @property
    def strategy(self) -> str:
        """The strategy as it stands in the panel's field."""
        return str(self.page.locator(".wb-panel .wb-text input").first.input_value())

    def write_strategy(self, text: str) -> None:
        """Write a strategy into the panel's field, and wait until the panel has it."""
        field = self.page.locator(".wb-panel .wb-text input").first
        field.fill(text)
        field.press("Enter")
        self.wait_for_text(text)

    def wait_for_text(self, text: str) -> None:
        """Wait until the strategy reads so, in the field and in the coloured copy that the kernel makes of it."""
        script = """text => document.querySelector('.wb-panel .wb-text input')?.value === text
            && document.querySelector('.wb-panel .wb-pieces')?.textContent.trim() === text"""
        self.page.wait_for_function(script, arg=text)
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        """Wait until the kernel has heard all that the page has said, and the page what the kernel has answered."""
        self.ask_kernel("")

    def settle(self) -> None:
        """Wait until sizes and colours are applied, what fades has faded, and the kernel has answered the page."""
        self.page.evaluate(FADED)
        self.wait_for_kernel()
        self.page.evaluate(FADED)

    def wait_for_state(self, word: str) -> None:
        """Wait for a state of the run, which the bar says whatever part of the panel is shown."""
        self.page.wait_for_selector(f".wb-panel .wb-state.{word}")

    def wait_for_step(self, step: int) -> None:
        """Wait until the run itself has come so far (one device may come first)."""
        script = """step => [...document.querySelectorAll('.wb-panel .wb-state:not(.first)')].some(
            state => Number(state.innerText.match(/step (\\d+)/)?.[1] ?? 0) >= step)"""
        self.page.wait_for_function(script, arg=step)

    def points(self, name: str) -> int:
        """Points of the live figure's traces whose names begin so."""
        return int(self.page.evaluate(POINTS, name))

    def wait_for_points(self, name: str, more_than: int = 0) -> None:
        """Wait until there are more points than so many, with the view in sight: what nobody sees is not drawn."""
        self._wait_for_figure(POINTS, name, more_than)

    @property
    def drawn_step(self) -> int:
        """The last step in the live figure's curve of losses. Its points become fewer in a long run."""
        return int(self.page.evaluate(LAST_STEP, "this run"))

    def wait_for_drawn_step(self, later_than: int) -> None:
        """Wait until the curve of losses reaches a later step, with the view in sight."""
        self._wait_for_figure(LAST_STEP, "this run", later_than)

    def _wait_for_figure(self, number: str, name: str, more_than: int) -> None:
        from playwright.sync_api import TimeoutError as TookTooLong

        try:
            self.page.locator(".wb-live-view .js-plotly-plot").first.scroll_into_view_if_needed()
            self.page.wait_for_function(f"([name, least]) => ({number})(name) > least", arg=[name, more_than])
        except TookTooLong:
            raise AssertionError(
                f"{name}: {self.page.evaluate(number, name)} after {PAGE_TIMEOUT_S} s, wanted more than {more_than}; "
                f"the page complained of {self.errors}, its figures: {self.page.evaluate(FIGURES_OF_PAGE)}, "
                f"the kernel's: {self.ask_kernel(FIGURES_OF_KERNEL)}"
            ) from None

    def ask_kernel(self, code: str) -> str:
        """What the code prints in the notebook's kernel, beside its cells."""
        script = """async code => {
            const future = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code});
            let printed = "";
            future.onIOPub = message => { printed += message.content.text ?? message.content.evalue ?? ""; };
            await future.done;
            return printed;
        }"""
        return str(self.page.evaluate(script, code))

    def open_tab(self, name: str, panel: Any = None) -> None:
        """Show a part of the (first) panel: strategy, live or compare."""
        panel = panel or self.page.locator(".wb-panel").first
        panel.locator(f"[role='tab'][data-tab='{name}']").click()
        panel.locator(f".wb-on-{name}").wait_for()

    def unreadable(self) -> list[str]:
        """Texts of the live view that are cut, or lie over one another."""
        return list(self.page.evaluate(UNREADABLE))

    @property
    def rows(self) -> Any:
        """The rows of the comparison."""
        return self.page.locator(".wb-panel .wb-comparison tbody tr")


def new_page(browser: Any, **options: Any) -> Any:
    """A page of a fresh context, whose waits are all as patient as those of the others, those of its widgets, too."""
    page = browser.new_page(**options)
    page.set_default_timeout(PAGE_TIMEOUT_S * 1000)
    page.add_init_script(PATIENT_WIDGETS)
    return page


PATIENT_WIDGETS = f"""(() => {{
    const [later, ends] = [globalThis.setTimeout, AbortSignal.timeout];
    globalThis.setTimeout = (call, ms, ...rest) => later(call, ms === 4000 ? {PAGE_TIMEOUT_S * 125} : ms, ...rest);
    AbortSignal.timeout = ms => ends.call(AbortSignal, Math.max(ms, {PAGE_TIMEOUT_S * 500}));
    const now = Date.now;
    Date.now = () => new Error().stack.includes('.get_model ') ? 0 : now();
}})()"""
"""ipywidgets asks for its models in another way where a kernel does not answer within 4 s, as when a page that is
loaded again misses the answer. It waits an eighth of a page's patience, so that the other way has time. anywidget gives
a module 2 s. It gets half of a page's patience, so that its error is there before a test gives up. ipywidgets gives a
model 2 s, too, and does not look once more at their end: a page that was busy all the time shows an error though it has
the model by then. Here it waits on."""


DARK_PAGE = "body[data-jp-theme-light='false']"

MARK_OUTPUTS = """([first, last]) => {
    for (const cell of window.jupyterapp.shell.currentWidget.content.widgets.slice(first, last + 1))
        for (const output of cell.node.querySelectorAll('.jp-OutputArea-child')) output.dataset.shownBefore = '';
}"""

FADED = """async () => {
    const frame = () => new Promise(requestAnimationFrame);
    const ends = animation => animation.effect?.getComputedTiming().endTime !== Infinity
        && !animation.animationName?.startsWith('cm-blink');  // a cursor out of sight blinks for ever
    await frame();
    await Promise.allSettled(document.getAnimations().filter(ends).map(animation => animation.finished));
    await frame();
}"""

_TRACES = """name => {
    const plots = [...document.querySelectorAll('.wb-live-view .js-plotly-plot')];
    const traces = plots.flatMap(plot => plot.data ?? []).filter(trace => trace.name?.startsWith(name));"""
POINTS = _TRACES + "return traces.reduce((sum, trace) => sum + (trace.x?.length ?? 0), 0); }"
LAST_STEP = _TRACES + "return Math.max(0, ...traces.map(trace => trace.x?.at(-1) ?? 0)); }"

CELLS_OF_PAGE = """selector => {
    const notebook = window.jupyterapp.shell.currentWidget;
    const look = element => [element.dataset.mimeType, element.offsetHeight, element.innerText.slice(0, 80)];
    const types = output => [output.output_type, ...Object.keys(output.data ?? {})].join(' ');
    const cells = (notebook?.content?.widgets ?? []).map(({ model, node }) => ({
        prompt: node.querySelector('.jp-InputPrompt')?.innerText,
        has: (model.outputs?.toJSON() ?? []).map(types),
        shows: [...node.querySelectorAll('.jp-OutputArea-output')].map(look),
        found: [...node.querySelectorAll(selector)].map(look)}));
    return [notebook?.sessionContext?.session?.kernel?.status, ...cells];
}"""
"""The kernel's state, and by cell its prompt, the outputs that it has and shows, and what a test waits for."""

FIGURES_OF_KERNEL = """
import ipywidgets
from workbench.ui.live.figure_widget import LiveFigureWidget
for figure in [found for found in list(ipywidgets.widget._instances.values()) if isinstance(found, LiveFigureWidget)]:
    print(figure.model_id, {trace.name: len(trace.x) for trace in figure.figure.data if trace.x is not None})
"""
"""By figure and trace how many points Python has drawn."""

FIGURES_OF_PAGE = """() => [...document.querySelectorAll('.wb-live-view .js-plotly-plot')].map(plot => ({
    shown: plot.getBoundingClientRect().height,
    traces: Object.fromEntries((plot.data ?? []).filter(trace => trace.x?.length).map(
        trace => [trace.name, trace.x.length])),
    numTraces: plot.data?.length}))"""
"""By figure how many points the page shows of a trace."""

UNREADABLE = """() => {
    const view = document.querySelector('.wb-live-view:has(.js-plotly-plot)');
    const frame = view.closest('.wb-panel').getBoundingClientRect();
    const problems = [];
    const shown = [];
    const parts = '.js-plotly-plot svg text, .wb-bar button, .wb-bar .wb-state, .wb-bar .wb-title, .wb-bar .wb-quiet';
    const bar = view.closest('.wb-panel').querySelector(':scope > .wb-stays');
    for (const element of [view, bar].flatMap(part => [...(part?.querySelectorAll(parts) ?? [])])) {
        const words = element.textContent.trim();
        const box = element.getBoundingClientRect();
        if (!words || element.closest('.hoverlayer, .modebar')) continue;
        if (!box.width || getComputedStyle(element).visibility === 'hidden') {
            if (element.closest('.xtick, .ytick')) problems.push(`${words} is left out`);
            continue;
        }
        if (box.left < frame.left - 1 || box.right > frame.right + 1) problems.push(`${words} is cut`);
        shown.push([words, box]);
    }
    if (shown.length < 30) problems.push(`only ${shown.length} texts`);
    shown.forEach(([one, a], i) => shown.slice(i + 1).forEach(([two, b]) => {
        const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (over > 2 && under > 2) problems.push(`${one} over ${two}`);
    }));
    return problems;
}"""
