"""A module that was edited: engines run the version that the notebook has loaded, or say why they cannot."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.session.simulated_session import SimulatedSession
from workbench.errors import CellError, SessionError
from workbench.session import user_modules
from workbench.session.comparison import training_on_engine
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject

OLD, NEW = 8, 4096
MODELS = """
from torch import nn
HIDDEN = {hidden}
class Net(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 2))
def make(): return Net()
"""
TRAINER = "import edited_models\nfrom edited_models import make\ndef width(): return make()[0].out_features"
LAZY = "def width():\n    from edited_models import HIDDEN\n    return HIDDEN"
NAMES = ("edited_models", "edited_trainer", "edited_lazy", "edited_pkg", "edited_pkg.parts", "edited_pkg.rest")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with modules of a user's, which this process can import."""
    write(tmp_path, edited_models=MODELS.format(hidden=OLD), edited_trainer=TRAINER, edited_lazy=LAZY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    user_modules.watch()
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def load(name: str) -> Any:
    return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)


def sent_from_a_notebook_with_present_files(value: Any, *used: str) -> bytes:
    """The payload of a notebook that has loaded the present files. This process is then an engine that has not."""
    versions = {}
    for name, version in user_modules.loaded().items():
        versions[name] = user_modules._version_of(version.file) or version
    rest = pickle.dumps((versions, used))
    return pickle.dumps(value) + rest + len(rest).to_bytes(8, "big")


def test_a_value_comes_back(folder):
    make = load("edited_models").make
    payload = user_modules.pack(({"a": [1, 2]}, make, lambda: make()))
    value, same, by_value = user_modules.unpack(payload)
    assert value == {"a": [1, 2]} and same is make and by_value()[0].out_features == OLD


def test_an_older_module_is_imported_anew_with_those_that_use_it(folder):
    trainer, lazy = load("edited_trainer"), load("edited_lazy")
    old = trainer.make()
    payload = user_modules.pack((trainer.width, lazy.width))
    assert [width() for width in user_modules.unpack(payload)] == [OLD, OLD]
    assert sys.modules["edited_trainer"] is trainer
    write(folder, edited_models=MODELS.format(hidden=NEW))
    payload = sent_from_a_notebook_with_present_files((trainer.width, lazy.width), "edited_trainer", "edited_lazy")
    assert [width() for width in user_modules.unpack(payload)] == [NEW, NEW]
    assert sys.modules["edited_trainer"] is not trainer and sys.modules["edited_lazy"] is lazy
    assert old[0].out_features == OLD and trainer.width() == OLD  # what was made before stays


def test_a_package_is_imported_anew_as_a_whole(folder):
    package = folder / "edited_pkg"
    package.mkdir()
    write(package, __init__="from edited_pkg import parts, rest", parts="SIZE = 1", rest="")
    load("edited_pkg")
    write(package, parts="SIZE = 22")
    user_modules.unpack(sent_from_a_notebook_with_present_files(None))
    new = importlib.import_module("edited_pkg")
    assert new.parts.SIZE == 22 and new.rest is sys.modules["edited_pkg.rest"]


def test_a_notebook_that_has_not_loaded_the_present_file_is_refused(folder):
    """The engine is new, for example: it imports the file as it is."""
    payload = user_modules.pack(load("edited_trainer").width)
    for name in NAMES:
        sys.modules.pop(name, None)
    write(folder, edited_models=MODELS.format(hidden=NEW))
    with pytest.raises(SessionError, match=r"module edited_models: .*edited_models.py of .*%autoreload 2"):
        user_modules.unpack(payload)
    assert user_modules.unpack(user_modules.pack(load("edited_trainer").width))() == NEW


def test_modules_that_a_request_does_not_use_may_differ(folder):
    load("edited_models")
    payload = user_modules.pack(load("edited_lazy").width)
    for name in NAMES:
        sys.modules.pop(name, None)
    write(folder, edited_models=MODELS.format(hidden=NEW))
    load("edited_models")
    user_modules.unpack(payload)


def test_an_edit_after_the_import_is_not_the_version_that_was_loaded(folder):
    load("edited_models")
    write(folder, edited_models=MODELS.format(hidden=NEW))
    first = user_modules.loaded()["edited_models"]
    assert first.digest != user_modules._version_of(first.file).digest
    load("edited_models")
    assert user_modules.loaded()["edited_models"].digest == user_modules._version_of(first.file).digest
    user_modules.forget_edited()
    assert "edited_models" in sys.modules
    write(folder, edited_models=MODELS.format(hidden=OLD))
    user_modules.forget_edited()
    assert "edited_models" not in sys.modules


@pytest.mark.parametrize("edit", ["a constant", "a function", "a default", "a method", "a method of a class"])
def test_a_module_that_is_changed_in_its_place_is_of_the_present_file(folder, edit):
    """As ``%autoreload 2`` does from IPython 9 on, where it can. An edit alone does not count."""
    models = load("edited_models")
    first = user_modules.loaded_in_notebook()["edited_models"]
    write(folder, edited_models=MODELS.format(hidden=NEW))
    assert user_modules.loaded_in_notebook()["edited_models"] == first
    if edit == "a constant":
        models.HIDDEN = NEW
    elif edit == "a function":
        models.make.__code__ = (lambda: NEW).__code__
    elif edit == "a default":
        models.make.__defaults__ = (NEW,)
    elif edit == "a method":
        models.Net.forward = lambda self, x: x
    else:
        models.Net.made = classmethod(lambda cls: cls())
    second = user_modules.loaded_in_notebook()["edited_models"]
    assert second == user_modules._version_of(first.file) != first
    models.count = 1  # the module's own code changes it
    assert user_modules.loaded_in_notebook()["edited_models"] == second


def test_only_modules_of_the_users_count(folder):
    load("edited_models")
    names = user_modules.loaded()
    assert "edited_models" in names and __name__ in names
    assert not {name.partition(".")[0] for name in names} & {"torch", "workbench", "json", "pytest", "__main__"}


def test_all_engines_get_a_job_again_where_a_new_one_would_get_other_code(folder, monkeypatch):
    make = load("edited_models").make
    data = torch.randn(32, 4), torch.randn(32, 2)
    session: Any = SimulatedSession()
    subject = Subject.of(make, data, nn.functional.mse_loss, batch_size=16, steps=3)
    with Comparison(session, subject) as comparison:
        sent = []

        def play(function: Any, *args: Any, ranks: Any = None) -> list[Any]:
            if function is training_on_engine.has_job:
                return [True, False]
            sent.append(ranks)
            return [training_on_engine.Prepared(1)] * len(ranks)

        monkeypatch.setattr(comparison, "_on_engines", play)
        comparison.prepare()
        write(folder, edited_models=MODELS.format(hidden=NEW))
        load("edited_models")
        comparison.prepare()
        comparison.prepare()
        assert sent == [[1], [0, 1], [1]]


@pytest.mark.engines
def test_a_comparison_after_an_edit_trains_the_new_model(session, folder):
    """As with ``%autoreload 2`` in a notebook: the cell runs again after an edit."""

    session.run(f"import sys\nsys.dont_write_bytecode = True\nsys.path.insert(0, {str(folder)!r})")
    data = torch.randn(32, 4), torch.randn(32, 2)

    def compared() -> wb.CompareResult:
        make = load("edited_models").make
        return wb.compare(
            make, data, nn.functional.mse_loss, ["data"], batch_size=16, steps=3, session=session, keep=False
        )

    before = compared()
    write(folder, edited_models=MODELS.format(hidden=NEW))
    after = compared()
    assert before.all_equal and after.all_equal
    held = [result.runs[0].memory_by_kind[0]["parameters"] for result in (before, after)]
    assert held[1] > 100 * held[0]

    session.push(model=sys.modules["edited_models"].Net())
    assert session.run("type(model).__module__, model[0].out_features").values == [("edited_models", NEW)] * 2

    write(folder, edited_models=MODELS.format(hidden=OLD))  # no reload: all ranks have the notebook's version
    assert session.submit(sys.modules["edited_models"].make).result()[0][0].out_features == NEW
    session.run("del sys.modules['edited_models']", ranks=[1])
    with pytest.raises(CellError, match=r"SessionError on rank 1: module edited_models: .*different versions"):
        session.submit(sys.modules["edited_models"].make).result()
    assert session.submit(load("edited_models").make).result()[1][0].out_features == OLD
