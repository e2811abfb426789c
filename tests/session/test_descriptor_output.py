"""What is written to a file descriptor is in the stream when the stream is flushed."""

import io
import os
import warnings

from workbench.session.on_engine.descriptor_output import DescriptorOutput, follow


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
        follow(DescriptorOutput(output.fileno(), stream))
        for number in range(500):
            os.write(output.fileno(), f"{number}\n".encode())
            stream.flush()
            assert stream.getvalue().endswith(f"{number}\n")
        for part in (b"\xc3", b"\xa9", b"x" * 2**15):
            os.write(output.fileno(), part)
            stream.flush()
        assert stream.getvalue()[-(2**15) - 1 :] == "\u00e9" + "x" * 2**15
    assert (tmp_path / "log").read_text() == stream.getvalue()


def test_a_full_disk_ends_the_log_and_not_the_output():
    """The thread that reads ended, so children that wrote more than a pipe holds waited for ever."""
    with open("/dev/full", "wb") as log, open(os.devnull, "wb") as output:
        stream = Stream(log.fileno())
        follow(DescriptorOutput(output.fileno(), stream))
        for _ in range(4):
            os.write(output.fileno(), b"x" * 2**16)
            stream.flush()
        assert stream.getvalue() == "x" * 2**18


def test_the_log_has_what_a_short_write_did_not_take(tmp_path, monkeypatch):
    plain_write = os.write
    with open(tmp_path / "log", "wb") as log, open(os.devnull, "wb") as output:
        stream = Stream(log.fileno())
        reader = DescriptorOutput(output.fileno(), stream)
        monkeypatch.setattr(os, "write", lambda number, text: plain_write(number, text[:3]))
        reader.pass_on(b"0123456789")
    assert (tmp_path / "log").read_text() == stream.getvalue() == "0123456789"


def test_a_fork_writes_to_the_descriptor_that_its_parent_reads():
    """Its prints vanished: the thread that sends what is in the stream is its parent's."""
    with open(os.devnull, "wb") as log, open(os.devnull, "wb") as output:
        stream = Stream(log.fileno())
        follow(reader := DescriptorOutput(output.fileno(), stream))
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of threads
            pid = os.fork()
        if not pid:
            reader.bypass()
            print("from the child", file=stream)
            print("with a flush", file=stream, flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        stream.flush()
        assert stream.getvalue() == "from the child\nwith a flush\n"


def test_what_was_written_to_the_first_is_passed_on_first():
    """Whoever reads, and whichever stream is flushed. A thread each showed 2 of 100 pairs in the other order."""
    passed_on = []

    class Recording(Stream):
        def write(self, text):
            passed_on.append(text)
            return super().write(text)

    with open(os.devnull, "wb") as log, open(os.devnull, "wb") as first, open(os.devnull, "wb") as second:
        streams = [Recording(log.fileno()), Recording(log.fileno())]
        follow(*map(DescriptorOutput, (first.fileno(), second.fileno()), streams))
        for number in range(2000):
            os.write(first.fileno(), b"out")
            os.write(second.fileno(), b"err")
            streams[number % 2].flush()
    assert passed_on == ["out", "err"] * 2000
