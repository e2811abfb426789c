"""How the tests are shared out between the workers of pytest-xdist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_REAL = re.compile(r"mark\.(engines|procs|browser)")


class SharingOut(LoadScopeScheduling):
    """Files that start processes, engines and browsers beside those that compute, which fill the time they wait.

    All but one of the workers may have such a file, as long as there is something else to do. The tests of one stay
    together, for what they share takes seconds to start; so do all that share the engines of ``tests/session``. Other
    files are cut into what has parameters, function by function, and the rest.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # what takes longest comes first; see conftest.py
        self._is_real: dict[str, bool] = {}

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        if self._starts_processes(file):
            return "tests/session" if file.startswith("tests/session/") else file
        function, parameters, _ = nodeid.partition("[")
        return function if parameters else file

    def _starts_processes(self, scope: str) -> bool:
        if scope not in self._is_real:
            path = Path(self.config.rootpath, scope)
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            self._is_real[scope] = scope == "tests/session" or bool(_REAL.search(text))
        return self._is_real[scope]

    def _assign_work_unit(self, node: WorkerController) -> None:
        busy = [
            scope
            for units in self.assigned_work.values()
            for scope, tests in units.items()
            if self._starts_processes(scope) and not all(tests.values())
        ]
        wants_real = len(busy) < self.numnodes - 1
        chosen = next((scope for scope in self.workqueue if self._starts_processes(scope) == wants_real), None)
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
