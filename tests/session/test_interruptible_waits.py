"""A thread that waits for other ranks is recognised by the file whose function waits."""

import threading
from pathlib import Path

from workbench.session.on_engine import control
from workbench.transport.network.helper_thread import HelperThread


def test_the_files_of_waits_exist():
    assert all(Path(file).is_file() for file in (control._LOCAL_WAITS, *control._REMOTE_WAITS))


def test_a_wait_in_a_helper_thread_is_recognised():
    release, found = threading.Event(), []

    def look() -> None:
        found.append(control._wait_of(control.sys._current_frames()[main], None))
        release.set()

    main = threading.get_ident()
    helper = HelperThread("test")
    helper.run(release.wait, look)
    helper.close()
    assert found[0].startswith("far 0.")
    assert control._wait_of(control.sys._current_frames()[main], None) == ""
