"""An engine that the kernel ends because memory ran out: the output says so, and what was lost; the next cell works."""

import os
import time
from pathlib import Path

import pytest

from workbench.errors import CellError
from workbench.session.processes import oom_kills

GROUPS = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A control group with little memory, for one process; version 1 or 2."""

    def __init__(self):
        for root, limit in ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max")):
            self.path = root / f"workbench-test-{os.getpid()}"
            try:
                self.path.mkdir()
                if (self.path / limit).exists():
                    self._limit = self.path / limit
                    return
                self.path.rmdir()
            except OSError:
                continue
        pytest.skip("this process may make no control group with a memory limit")

    def hold(self, pid, size_bytes):
        self._limit.write_text(str(size_bytes))
        (self.path / "cgroup.procs").write_text(str(pid))

    def remove(self):
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except OSError:  # the process is not quite gone
                time.sleep(0.05)


@pytest.fixture
def limit():
    limit = MemoryLimit()
    yield limit
    limit.remove()


def test_kills_are_counted(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 17\noom_kill 3\npgfault 5\n")
    assert oom_kills.count(counters) == 3
    assert oom_kills.count(tmp_path / "nothing") == 0


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timed
def test_the_kernel_ends_an_engine_for_want_of_memory(session, limit, capfd):
    session.run("kept = 17\nfirst, second = 1, 2")
    status = session.status()[1]
    limit.hold(status.pid, status.memory_bytes + 300_000_000)
    began = time.monotonic()
    with pytest.raises(CellError) as caught:
        session.run("large = []\nwhile wb.rank() == 1: large.append(torch.ones(10_000_000))\nwb.barrier()")
    assert time.monotonic() - began < 20  # it takes a while to fill
    text = str(caught.value)
    assert "rank 1 died while running this cell (out of memory" in text
    assert "its variables are lost" in text and "%workbench recover" in text
    assert "rank 0 was running at cell line 3" in text and "its variables are kept" in text
    assert session.run("globals().get('kept'), wb.rank()").values == [(17, 0), (None, 1)]
    printed = capfd.readouterr().err
    assert "rank 1 died (out of memory" in printed
    assert "lost: first, kept, large, second" in printed


@pytest.mark.engines
def test_engines_go_before_the_notebook(session):
    scores = session.run("int(open('/proc/self/oom_score_adj').read())").values
    assert all(score > int(Path("/proc/self/oom_score_adj").read_text()) for score in scores)


@pytest.mark.engines
def test_an_allocation_that_is_refused_is_an_error_like_others(session):
    with pytest.raises(CellError, match=r"(?s)RuntimeError on ranks 0-1: .*allocate.*memory"):
        session.run("kept = 1\ntorch.empty(10**15)")
    assert session.run("kept").values == [1, 1]
