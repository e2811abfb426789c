"""What is written to a file descriptor is in the stream when the stream is flushed."""

import io
import os

from workbench.session.on_engine.descriptor_output import DescriptorOutput


class Stream(io.StringIO):
    """A stream whose descriptor was another one before, as ipykernel's are."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def fileno(self):
        return self.number


def test_a_flush_finds_all_that_was_written(tmp_path):
    with open(tmp_path / "log", "wb") as log, open(os.devnull, "wb") as output:
        stream = Stream(log.fileno())
        DescriptorOutput(output.fileno(), stream)
        for number in range(500):
            os.write(output.fileno(), f"{number}\n".encode())
            stream.flush()
            assert stream.getvalue().endswith(f"{number}\n")
        for part in (b"\xc3", b"\xa9", b"x" * 2**15):
            os.write(output.fileno(), part)
            stream.flush()
        assert stream.getvalue()[-(2**15) - 1 :] == "\u00e9" + "x" * 2**15
    assert (tmp_path / "log").read_text() == stream.getvalue()


def test_a_flush_in_a_fork_reads_nothing(monkeypatch):
    """The pipe is its parent's, and another thread of the parent may have had the lock."""
    with open(os.devnull, "wb") as log, open(os.devnull, "wb") as output:
        stream = Stream(log.fileno())
        reader = DescriptorOutput(output.fileno(), stream)
        reads = []
        monkeypatch.setattr(reader, "_read", lambda: reads.append(os.getpid()))
        stream.flush()
        assert reads == [os.getpid()]
        monkeypatch.setattr(os, "getpid", lambda: 0)
        stream.flush()
        assert 0 not in reads
