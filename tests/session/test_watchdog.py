"""What a guarded process does before it becomes an engine."""

import json
import os
import threading
import time

import workbench.tensors.world  # noqa: F401 - what an engine loads first
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.session.processes import watchdog


def test_an_engine_waits_until_the_controller_has_written_where_it_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("IPP_CONNECTION_INFO", "")
    path, told = tmp_path / "engine.json", {"interface": "tcp://127.0.0.1", "registration": 50_000}
    waiting = threading.Thread(target=watchdog.prepare_engine, args=(str(path),), daemon=True)
    waiting.start()
    text = json.dumps(told)
    for part in ("", text[:10], text):
        path.write_text(part)
        if part != text:
            time.sleep(0.05)
            assert waiting.is_alive() and not os.environ["IPP_CONNECTION_INFO"]
    waiting.join(WAIT_TIMEOUT_S)
    assert json.loads(os.environ["IPP_CONNECTION_INFO"]) == told
