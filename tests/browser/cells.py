"""One notebook that several files open, and run one cell of at a time; nothing has to be started for any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.browser.page import ROOT, LabPage
from tests.ui.models import GPT_HYBRID

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import workbench as wb
from tests.ui.models import gpt
from torch.nn.functional import cross_entropy
def gpt_8_blocks(): "Only its name is shown."
def gpt_24_blocks(): "Only its name is shown."
"""
PANEL = f"""
panel = wb.Panel(gpt_8_blocks, (32, 64), cross_entropy, strategy={GPT_HYBRID!r}, batch_size=32,
                 hardware="v100-dgx1", num_ranks=4, costs=gpt(8))
panel
"""
"""A panel of a GPT that only predicts."""
DEEP = """
strategy = ("tok_emb: model; pos_emb: data; " + "; ".join(f"blocks.[{6 * n}-{6 * n + 5}]: model@{n}" for n in range(4))
            + "; ln_f: data; lm_head: model | 4x2x8 mb=8 1f1b")
wb.Panel(gpt_24_blocks, (256, 256), cross_entropy, strategy=strategy, batch_size=256, hardware="v100-dgx2",
         num_ranks=64, costs=gpt(24, 768, 50304, 256))
"""
CONVOLUTIONS = """
def convolutions():
    up = nn.ModuleDict({f"conv{n}": nn.Conv2d(32, 32, 3, padding=1) for n in (1, 2)})
    return nn.ModuleDict({"down1": up, "out": nn.Conv3d(128, 128, 3)})

from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.rows import Layer
layers = [Layer(f"down1.conv{n}", "Conv2d", {"weight": (32, 32, 3, 3)}, 9216) for n in (1, 2)]
layers.append(Layer("out", "Conv3d", {"weight": (128, 128, 3, 3, 3)}, 442368))
wb.Panel(convolutions, (32, 3, 16, 16), cross_entropy, num_ranks=2,
         costs=ModelCosts(tuple(map(LayerCost, layers))))
"""
EXPERTS = """
def experts(): "Only its name is shown."

from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.rows import Layer
layers = [Layer(f"blocks.{n}.{name}", kind, {"weight": (8, 64, 64) if number else (8, 64)}, experts=number)
          for n in range(2) for name, kind, number in (("router", "Linear", 0), ("experts", "Experts", 8))]
layers.append(Layer("experts", "Experts", {"up": (8, 64, 64)}, experts=8))
wb.Panel(experts, (32, 64), cross_entropy, num_ranks=8, strategy="*: data; *: expert:4",
         costs=ModelCosts(tuple(map(LayerCost, layers))))
"""
RUNS = f"""
from workbench.session.comparison.compare import CompareResult
wb.draw.runs(CompareResult.from_json(open({str(Path(__file__).with_name("six_runs.json"))!r}).read()))
"""
"""The table of six recorded runs."""
FIGURE = """
import ipywidgets
from workbench.ui.live.figure_widget import LiveFigureWidget
from workbench.ui.live.live_figure import empty_figure, show_one_device, show_steps

widget = LiveFigureWidget(empty_figure(2, 1000))
box = ipywidgets.VBox([widget])
box.add_class("wb-live-view")
box
"""
"""A live figure alone."""

CELLS = [SETUP, PANEL, DEEP, CONVOLUTIONS, EXPERTS, RUNS, FIGURE, ""]
NOTEBOOK = "cells.ipynb"


def open_cells(open_notebook: Callable[..., LabPage]) -> LabPage:
    """The page that shows this notebook, whose first cell has run; its kernel has run other files' cells, too."""
    lab_page = open_notebook(NOTEBOOK, cells=CELLS)
    lab_page.run_cell(0)
    return lab_page


def show(lab_page: LabPage, cell: str, selector: str) -> LabPage:
    """The page with what a cell shows, as nobody has touched it."""
    lab_page.show(CELLS.index(cell), selector)
    return lab_page
