"""What a notebook's kernel answers on Tab and on Shift-Tab."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

import workbench as wb
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.session.magic import SessionMagics
from workbench.session.magic_commands import COMMANDS

pytestmark = pytest.mark.procs


class Kernel:
    """A notebook's kernel in which the workbench is loaded, and nothing of it was used."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.client.execute_interactive("import workbench as wb\n%load_ext workbench", timeout=WAIT_TIMEOUT_S)

    def _answer(self, message_id: str) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=WAIT_TIMEOUT_S)
            if message["parent_header"].get("msg_id") == message_id:
                return dict(message["content"])

    def complete(self, code: str) -> dict[str, str]:
        """What Tab at the end of the code proposes, each with its signature."""
        metadata = self._answer(self.client.complete(code, len(code)))["metadata"]
        return {found["text"]: found["signature"] for found in metadata["_jupyter_types_experimental"]}

    def inspect(self, code: str) -> str:
        """What Shift-Tab at the end of the code shows, without its colours."""
        return re.sub(r"\x1b\[\d+m", "", self._answer(self.client.inspect(code, len(code)))["data"]["text/plain"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    kernel.manager.context.destroy(linger=0)


def test_a_function_comes_with_its_signature(kernel: Kernel) -> None:
    for before in ("", "%%global\n"):
        found = kernel.complete(f"{before}wb.paral")
        assert list(found) == ["parallelize"] and "strategy" in found["parallelize"]


def test_help_has_signature_and_docstring(kernel: Kernel) -> None:
    for before in ("", "%%global\n"):
        shown = kernel.inspect(f"{before}wb.parallelize(")
        assert "optimizer: " in shown and "over the ranks of the world" in shown


@pytest.mark.parametrize("namespace", ["wb", "wb.planner", "wb.draw", "wb.debug", "wb.checkpoint", "wb.flow.nn"])
def test_proposals_are_the_public_names(kernel: Kernel, namespace: str) -> None:
    found, own = kernel.complete(f"{namespace}."), wb
    for part in namespace.split(".")[1:]:
        own = getattr(own, part)
    extra = {"errors", "flow", "testing"} if own is wb else set()
    assert set(found) == {*own.__all__, *extra}


def test_a_signature_fits_on_a_screen(kernel: Kernel) -> None:
    shown = kernel.inspect("wb.planner.plan(").split("Docstring")[0]
    assert "software: 'Software' = Software('workbench')," in shown and len(shown.splitlines()) < 30


def test_lines_of_magics_have_their_own_words(kernel: Kernel) -> None:
    assert set(kernel.complete("%workbench ")) == set(COMMANDS)
    assert set(kernel.complete("%workbench st")) == {"start", "status", "stop"}
    assert set(kernel.complete("%workbench start --e")) == {"--engines"}
    assert set(kernel.complete("%%global --ti")) == {"--time", "--timeout"}
    for line, magic in (
        ("%%global -", SessionMagics.cell_global),
        ("%workbench start -", SessionMagics.line_workbench),
    ):
        options: Any = magic
        known = {name for action in options.parser._actions for name in action.option_strings}
        assert set(kernel.complete(line)) == known - {"-h", "--help"}
