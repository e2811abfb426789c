"""A training that scripts and cells run on several hosts, and the losses that it has on one device."""

import os
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

TRAIN = """
import socket
import torch
import torch.nn.functional as F
import workbench as wb

wb.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model = wb.parallelize(model, "*: data")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.randn(67, 8, generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(5):
    loss = F.cross_entropy(model(data), data.argmax(1) % 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"rank {wb.rank()} of {wb.world_size()} on {socket.gethostname()} {losses}\\n", end="", flush=True)
"""

LOOP = """
import time
x = wb.ones(wb.world_size(), 4, placement=wb.placement.all("cpu"), sbp=wb.sbp.split(0))
while True:
    x.to_global(sbp=wb.sbp.broadcast)
    time.sleep(0.05)
"""
"""A cell that does not end."""


def environment_of_scripts():
    """``python`` is this one, and imports this checkout."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def section(heading):
    """A section of the page of many hosts."""
    page = (ROOT / "docs" / "many-hosts.md").read_text(encoding="utf-8")
    return re.search(rf"\n## {heading}\n(.*?)(?=\n## |$)", page, re.DOTALL)[1]


def blocks(heading, language):
    """The blocks of a language in a section."""
    return re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)


def lines_of_ssh():
    """The lines of the documented profile that all launchers need."""
    (profile,) = blocks("SSH", "python")
    return profile[profile.index("c.Cluster.controller_ip") :]


def run_cell(code):
    """As a cell does, in the engine's names."""
    from workbench.session import engine

    exec(code, engine.shell().user_ns)


def assert_trained(by_rank, hosts):
    """As many ranks as named are on each host, and all have the losses of one device."""
    alone = {}
    exec(
        TRAIN[: TRAIN.index("print(")].replace("wb.init()", "").replace('wb.parallelize(model, "*: data")', "model"),
        alone,
    )
    assert sorted(host for host, _ in by_rank) == hosts
    for _, losses in by_rank:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone["losses"]), rtol=1e-5, atol=0)


def printed_by_ranks(text):
    """What ``TRAIN`` has printed on each rank: its host and its losses, by rank."""
    lines = sorted((int(line.split()[1]), line) for line in text.splitlines() if line.startswith("rank "))
    assert [rank for rank, _ in lines] == list(range(len(lines))), text
    assert all(f" of {len(lines)} on " in line for _, line in lines), text
    hosts_and_losses = (line.partition(" on ")[2].partition(" ") for _, line in lines)
    return [(host, [float(loss) for loss in losses.strip("[]").split(", ")]) for host, _, losses in hosts_and_losses]
