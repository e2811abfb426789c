"""The peak of a process's memory, also where what was there before goes away meanwhile."""

import mmap
import sys

import pytest
import torch

from workbench.training.diagnostics.memory import PeakMeter, uncounted_in_peaks

MIB = 2**20
HELD = 24 * MIB
UNCOUNTED = MIB
"""Linux counts resident pages per processor and adds the counts up now and then."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the resident size is known")


def hold(num_bytes=HELD):
    return torch.ones(num_bytes, dtype=torch.uint8)


def test_a_peak_that_is_over_counts():
    meter = PeakMeter(torch.device("cpu"))
    hold()
    assert HELD - UNCOUNTED <= meter.peak_bytes() < 2 * HELD


def test_a_later_meter_knows_nothing_of_it():
    hold()
    assert PeakMeter(torch.device("cpu")).peak_bytes() < MIB


@pytest.mark.parametrize("is_file", [True, False])
def test_pages_that_go_away_hide_nothing(is_file, tmp_path):
    """As when the kernel takes back pages of libraries, or buffers of exchanges before are unmapped."""
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * HELD))
    with open(path) as file:
        mapped = mmap.mmap(
            file.fileno() if is_file else -1, 2 * HELD, prot=mmap.PROT_READ | mmap.PROT_WRITE * (not is_file)
        )
        touched = sum(mapped[place] for place in range(0, len(mapped), 4096))
    meter = PeakMeter(torch.device("cpu"))
    mapped.close()
    kept = hold()
    assert touched == 0 and meter.peak_bytes() >= len(kept) - UNCOUNTED


def test_pages_of_files_that_come_meanwhile_count_nowhere(tmp_path):
    """As those of libraries do in the first run of a process. The system takes them back where it needs memory."""
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * HELD))
    meter = PeakMeter(torch.device("cpu"))
    with open(path) as file:
        mapped = mmap.mmap(file.fileno(), 2 * HELD, prot=mmap.PROT_READ)
        assert sum(mapped[place] for place in range(0, len(mapped), 4096)) == 0
    assert meter.peak_bytes() < UNCOUNTED
    with uncounted_in_peaks():
        mapped.close()
    hold()
    assert HELD - UNCOUNTED <= meter.peak_bytes() < HELD + UNCOUNTED


def test_what_records_counts_in_no_peak():
    """Neither its highest point nor what stays of it; what the run holds before and after does."""
    meter = PeakMeter(torch.device("cpu"))
    hold()
    with uncounted_in_peaks():
        recorded = hold()
        hold(2 * HELD)
        assert HELD - UNCOUNTED <= meter.peak_bytes() < HELD + UNCOUNTED
    assert len(recorded) == HELD and HELD - UNCOUNTED <= meter.peak_bytes() < HELD + UNCOUNTED
    hold(2 * HELD)
    assert 2 * HELD - UNCOUNTED <= meter.peak_bytes() < 2 * HELD + UNCOUNTED
    with uncounted_in_peaks():
        del recorded
    hold(3 * HELD)
    assert 3 * HELD - UNCOUNTED <= meter.peak_bytes() < 3 * HELD + UNCOUNTED


def test_pauses_of_several_threads_end_with_the_last():
    """Simulated ranks take profiles at the same time, and each paused the meters of the others."""
    meter = PeakMeter(torch.device("cpu"), collects_garbage=False)
    one, other = uncounted_in_peaks(), uncounted_in_peaks()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert meter.is_paused
    other.__exit__(None, None, None)
    assert not meter.is_paused
