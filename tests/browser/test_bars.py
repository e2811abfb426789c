"""tqdm in cells of a real JupyterLab: one bar for all ranks, in place, in the colour of how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
CELLS = [
    "%load_ext workbench\n%workbench start --engines 2 --device cpu",
    "%%global\nimport time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(30), 'auto'): time.sleep(0.02)",
    "%%global\nfrom tqdm.notebook import tqdm as bars\nfor _ in bars(range(10), 'notebook'): time.sleep(0.02)",
    "%%global\nfrom tqdm import tqdm, trange\nfor _ in trange(2):\n  for _ in trange(9): time.sleep(0.02)",
    "%%global\nfor i in tqdm(range(100), 'break'):\n    if i == 20 * (1 + wb.rank()): break\nprint('printed after it')",
    "%%global\nfor i in tqdm(range(50), 'broken'):\n    if i == 20: raise ValueError('mine')",
    "%%global\nfor _ in tqdm(range(60), 'slow'): time.sleep(0.2 if wb.rank() else 0.01)",
]
STATES = {1: ["finished"], 2: ["finished"], 3: ["finished"] * 3, 4: ["left"], 5: ["failed"], 6: ["runs"]}
RED = """(bar) => getComputedStyle(bar.querySelector('[role=progressbar] span')).backgroundColor"""


def test_bars(open_notebook: Any, lab: LabServer) -> None:
    write_notebook(lab.folder / "bars.ipynb", CELLS)
    lab_page = open_notebook("bars.ipynb")
    page = lab_page.page
    lab_page.run_cell(0, 5)
    page.locator("[data-state=failed]").first.wait_for()
    lab_page.run_cell(6)  # an error takes what waits behind its cell out of JupyterLab's queue
    page.locator("[data-state=runs]", has_text="rank 0: 60").first.wait_for()
    page.screenshot(path=lab.folder / "bars.png")
    cells = page.locator(".jp-CodeCell")
    for number, states in STATES.items():
        bars = cells.nth(number).locator("[data-state]")
        assert [bar.get_attribute("data-state") for bar in bars.all()] == states, CELLS[number]
        texts = "".join(cells.nth(number).locator("pre").all_inner_texts())
        assert "%|" not in texts, "a bar as text, too"
        reds = cells.nth(number).locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        assert all("ValueError on ranks 0-1" in red for red in reds) and len(reds) == (number == 5), reds
    red = page.locator("[data-state=failed]").first.evaluate(RED)
    assert red != page.locator("[data-state=finished]").first.evaluate(RED)
