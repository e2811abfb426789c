"""What is built is complete, runs where there is no checkout, and leaves nothing behind.

The source distribution is built from the files that git knows, the wheel from the unpacked source distribution, and
the wheel is installed into an environment that borrows its dependencies from the one that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import workbench
from tests.timeouts import PROGRAM_TIMEOUT_S

pytestmark = pytest.mark.engines
ROOT = Path(__file__).parent.parent
NOT_PACKAGED = {"README.md"}
"""Files of the package that are for readers of its source."""


@dataclass(frozen=True)
class Built:
    """A source distribution, and the wheel that was built from it."""

    source: Path
    wheel: Path


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and a home folder for what its commands write."""

    folder: Path
    home: Path
    before: frozenset[str]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A command in the home folder, where no checkout is near."""
        without = {"PYTHONPATH", "XDG_DATA_HOME", "WORKBENCH_RUNS", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"}
        environment = {name: value for name, value in os.environ.items() if name not in without}
        environment |= {"HOME": str(self.home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            list(map(str, command)),
            cwd=self.home, env=environment, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False,
        )  # fmt: skip


def build(kind: str, source: Path, out: Path) -> Path:
    """By the backend that pyproject.toml names, without fetching anything."""
    out.mkdir(exist_ok=True)
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = out.iterdir()
    return found


def tracked() -> list[str]:
    """Files of the repository, by path."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    for name in tracked():
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "checkout" / name)
    source = build("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(source) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11 before 3.11.4 knows no filters
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(source, build("wheel", unpacked, folder / "wheel"))


def pip(python: Path, *arguments: str | Path) -> None:
    """The pip that runs here, on another environment; nothing is fetched."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def files_below(folder: Path, without: Sequence[str] = ("__pycache__",)) -> frozenset[str]:
    """Paths of files and folders."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return frozenset(str(path) for path in found if not set(without) & set(path.parts))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder, home = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PROGRAM_TIMEOUT_S)
    (folder / "share").mkdir()  # wherever ipykernel is installed, it has put its kernel there
    here = Installed(folder, home, files_below(folder))
    pip(here.python, "install", "--no-deps", "--no-index", built.wheel)
    # A plain line: what is installed there in editable form, such as this project, does not come along.
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
    return here


def test_everything_of_the_package_is_in_the_wheel(built: Built) -> None:
    shared = f"workbench-{workbench.__version__}.data/data/share/workbench/"
    with zipfile.ZipFile(built.wheel) as archive:
        packed = {name.replace(shared, "notebooks/") for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in tracked() if name.startswith("workbench/") and Path(name).name not in NOT_PACKAGED}
    notebooks = {name for name in tracked() if Path(name).match("notebooks/*.ipynb")}
    assert packed == package | notebooks
    assert len(notebooks) >= 4
    assert "workbench/py.typed" in packed


def test_the_source_distribution_has_no_tests(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
    assert folders == {"workbench", "workbench.egg-info", "notebooks"}
    assert built.source.name == f"workbench-{workbench.__version__}.tar.gz"


@pytest.mark.slow
def test_it_is_imported_without_a_warning(installed: Installed) -> None:
    program = "import workbench; print(workbench.__file__, workbench.Session, workbench.GlobalTensor)"
    done = installed.run(installed.python, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed.folder)) and not done.stderr


@pytest.mark.slow
def test_its_commands_run_and_nothing_is_left_when_it_goes(installed: Installed) -> None:
    command = installed.folder / "bin" / "workbench"
    doctor = installed.run(command, "doctor")
    assert doctor.returncode == 0 and doctor.stdout.endswith("All that is needed works.\n"), doctor.stdout
    demo = installed.run(command, "demo", "--steps", "3", "--out", "report.html")
    assert demo.returncode == 0, demo.stderr
    assert "All 4 strategies train as one device does." in demo.stdout
    assert (installed.home / "report.html").stat().st_size > 10_000
    first = "from workbench.cli.lab import find_notebook; print(find_notebook(None).stat().st_size)"
    assert int(installed.run(installed.python, "-c", first).stdout) > 1000
    assert len(list((installed.home / "workbench-notebooks").glob("0*.ipynb"))) >= 4
    pip(installed.python, "uninstall", "--yes", "workbench")
    (borrowed,) = installed.folder.glob("lib/python*/site-packages/borrowed.pth")
    borrowed.unlink()
    assert files_below(installed.folder) == installed.before
    # IPython makes its profile; the recorded runs are the user's.
    left = {name for name in files_below(installed.home) if not name.startswith((".ipython", "workbench-notebooks"))}
    runs = {name for name in left if name.startswith(".local/share/workbench/runs/")}
    assert len(runs) == 10  # one device and four strategies, of two networks
    assert left - runs == {
        "report.html",
        ".local",
        ".local/share",
        ".local/share/workbench",
        ".local/share/workbench/runs",
    }
