"""Record the six runs that tests/browser/test_comparison_page.py shows: a GPT of four blocks on two engines, predicted.

python -m tests.browser.record_runs
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import workbench as wb
from workbench.session import Session

TARGET = Path(__file__).with_name("six_runs.json")
WIDTH, LENGTH, WORDS, HEADS = 256, 64, 512, 4
STRATEGIES = ("data", "*: data | 1x2x1 zero=3", "model", "pipeline", "hybrid", "*: data | 1x2x1 recompute")


class Block(nn.Module):
    """Attention and two linear layers, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))
        return found


class GPT(nn.Module):
    """A table, four blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.blocks(self.embed(ids))))
        return found


def gpt_4_blocks() -> nn.Module:
    return GPT()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    ids = torch.randint(WORDS, (512, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with Session(engines=2) as session:
        machine = wb.planner.calibrate(session)
        options = {"batch_size": 16, "steps": 20, "hardware": machine, "keep": False}
        panel = wb.Panel(gpt_4_blocks, data, loss, strategy="data", session=session, **options)
        for strategy in STRATEGIES:
            panel.load(strategy)
            panel.run()
            panel.wait()
        assert panel.baseline is not None
        records = {"baseline": panel.baseline.to_dict(), "runs": [run.to_dict() for run in panel.runs], "settings": {}}
    TARGET.write_text(json.dumps(records, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
