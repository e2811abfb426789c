"""Cells that several tests open: a panel of a GPT that only predicts, so that nothing has to be started for it."""

from __future__ import annotations

from tests.browser.page import ROOT
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
panel = wb.Panel(None, gpt_8_blocks, (32, 64), cross_entropy, strategy={GPT_HYBRID!r}, batch_size=32,
                 hardware="v100-dgx1", num_ranks=4, costs=gpt(8))
panel
"""
