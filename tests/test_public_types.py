"""The types that a user's program sees; part of `make check`, beside the types of the project itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import workbench as wb
from tests.test_public_surface import NAMESPACES, SCRIPT

pytestmark = pytest.mark.types
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """What ``mypy --strict`` says of a file, without this project's settings."""
    cache = tmp_path_factory.mktemp("mypy")

    def check(file: Path) -> str:
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
        command += ["--config-file", "", "--cache-dir", str(cache), str(file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    return check


def test_mypy_finds_no_error_in_a_users_script(mypy: Callable[[Path], str]) -> None:
    assert mypy(SCRIPT) == ""


def test_every_name_has_a_type(mypy: Callable[[Path], str], tmp_path: Path) -> None:
    names = [f"wb.{name}" for name in wb.__all__]
    names += [f"wb.{space}.{name}" for space in NAMESPACES for name in getattr(wb, space).__all__]
    file = tmp_path / "names.py"
    file.write_text("import workbench as wb\n" + "".join(f"reveal_type({name})\n" for name in names))
    types = re.findall(r'Revealed type is "(.*)"', mypy(file))
    assert len(types) == len(names)
    assert not [name for name, found in zip(names, types, strict=True) if found == "Any"]


def test_a_parallelized_module_keeps_its_type(mypy: Callable[[Path], str], tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import workbench as wb\nfrom torch import nn\nreveal_type(wb.parallelize(nn.RNN(2, 2), 'data'))\n")
    assert re.findall(r'Revealed type is "(.*)"', mypy(file)) == ["torch.nn.modules.rnn.RNN"]


def test_a_name_that_is_not_there_is_an_error(mypy: Callable[[Path], str], tmp_path: Path) -> None:
    file = tmp_path / "unknown.py"
    names = ["wb.paralelize", "wb.save", *(f"wb.{space}.no_such_name" for space in NAMESPACES)]
    file.write_text("import workbench as wb\n" + "".join(f"{name}\n" for name in names))
    assert mypy(file).count("has no attribute") == len(names)
