"""The live view of a small GPT on four ranks, at 1280 px: every part is drawn, and no text lies on another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import SECONDS, LabPage
from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
NOTEBOOK = "live.ipynb"
HYBRID = "embed: data; blocks.[0-1]: model; blocks.[2-3]: model@1; norm: data@1; head: model@1 | 2x1x2 mb=4 1f1b"
_SOURCE = f"""%load_ext workbench
%workbench start --engines 4
---
import torch
from torch import nn
import torch.nn.functional as F
import workbench as wb
from workbench.session import current

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

def gpt():
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(256, 128))
    model.add_module("blocks", nn.Sequential(*(Block(128) for _ in range(4))))
    model.add_module("norm", nn.LayerNorm(128))
    model.add_module("head", nn.Linear(128, 256))
    return model

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

text = torch.randint(0, 256, (512, 65), generator=torch.Generator().manual_seed(0)).cumsum(1) % 16
data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
---
panel = wb.Panel(current(), gpt, data, loss, strategy={HYBRID!r}, batch_size=16, steps=150,
                 hardware=wb.calibrate(current()), optimizer_fn=lambda weights: torch.optim.AdamW(weights, lr=1e-3))
panel
"""


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> Any:
    """A panel on four engines, in a page as wide as a small laptop's."""
    write_notebook(lab.folder / NOTEBOOK, _SOURCE.split("---\n"))
    lab_page = open_notebook(NOTEBOOK)
    lab_page.page.set_viewport_size({"width": 1280, "height": 1400})
    lab_page.run_cells(2)
    lab_page.wait_for_output(".wb-panel button.wb-primary", timeout_s=400)
    return lab_page


def overlaps(lab_page: LabPage) -> list[str]:
    """Pairs of texts of the live figure that lie on each other, and texts that leave it."""
    script = """() => {
        const plot = document.querySelector('.wb-live-view .js-plotly-plot');
        const frame = plot.getBoundingClientRect();
        const boxes = [...plot.querySelectorAll('text')]
            .filter(text => text.textContent.trim() && !text.closest('.hoverlayer'))
            .map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
        const found = boxes.filter(([, box]) => box.right > frame.right + 2 || box.left < frame.left - 2)
            .map(([text]) => `${text} leaves the figure`);
        boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
            const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (over > 2 && under > 4) found.push(`${one} over ${two}`);
        }));
        return found;
    }"""
    return list(lab_page.page.evaluate(script))


def take(lab_page: LabPage, light: str, dark: str) -> None:
    """Pictures in both themes."""
    view = lab_page.page.locator(".wb-live-view").first
    lab_page.screenshot(light, view)
    lab_page.dark(True)
    lab_page.page.wait_for_timeout(1 * SECONDS)
    lab_page.screenshot(dark, view)
    lab_page.dark(False)


def test_a_run_from_one_device_to_the_end(opened: LabPage) -> None:
    from playwright.sync_api import expect

    opened.run_button.click()
    opened.page.wait_for_selector(".wb-live-view .wb-state.first", timeout=150 * SECONDS)
    opened.wait_for_step(30)
    opened.wait_for_points("forward, simulated", 1)
    assert overlaps(opened) == []
    opened.button("Change strategy").click()
    opened.wait_for_state("paused")
    assert overlaps(opened) == []
    opened.button("data").click()
    opened.button("Apply").click()
    opened.wait_for_step(80)
    assert overlaps(opened) == []
    take(opened, "live.png", "live-dark.png")
    expect(opened.rows).to_have_count(2, timeout=150 * SECONDS)
    opened.wait_for_state("done")
    assert overlaps(opened) == []
