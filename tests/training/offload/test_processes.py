"""``offload=`` on real processes, whose boxings hand out shared memory, and what is left of one that is killed."""

import os
import subprocess
import textwrap

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests import warm
from tests.processes import run_processes
from tests.training.models import batch_for, make
from workbench.training.gradients import state_on_host
from workbench.training.offload import activations

pytestmark = pytest.mark.procs
CASES = [("mlp", "*: model"), ("cnn", "*: data | zero=2 mb=2"), ("attention", "*: model"), ("mlp", "pipeline | mb=2")]


def trained(kind, strategy):
    """Losses and weights after some steps."""
    torch.manual_seed(0)
    model = wb.parallelize(make(kind), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = batch_for(kind)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(wb.forward_backward(model, F.cross_entropy, inputs, targets).full_tensor().detach())
        optimizer.step()
    return [*losses, *(p.full_tensor().detach() for p in model.parameters())]


def both_ways():
    """For each case, whether the bits are the same with and without."""
    activations.MIN_BYTES, state_on_host.BUCKET_BYTES = 64, 600
    found = []
    for kind, strategy in CASES:
        offloaded = strategy + (" " if "|" in strategy else " | ") + "offload=optimizer+activations"
        pairs = zip(trained(kind, strategy), trained(kind, offloaded), strict=True)
        found.append(all(torch.equal(one, other) for one, other in pairs))
    return found


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_numbers_are_those_without_it(transport):
    found = run_processes(both_ways, 2, environment={"WORKBENCH_TRANSPORT": transport})
    assert found == [[True] * len(CASES)] * 2


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""\
        import time, torch
        import workbench as wb
        from torch import nn

        wb.init()
        model = wb.parallelize(nn.Linear(512, 512), "*: data | offload=optimizer+activations")
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.ones(512, 512)).sum()
        loss.backward()
        optimizer.step()
        print(wb.debug.memory_report(optimizer)[0]["offloaded"], flush=True)
        time.sleep(100)
        """)
    )
    folder = tmp_path / "files"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    child = subprocess.Popen([warm.executable(), str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert f"in files in {folder}" in child.stdout.readline()
        assert int(child.stdout.readline()) == 8 * (512 * 512 + 512)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert not any("offload" in path.name for path in folder.rglob("*"))
