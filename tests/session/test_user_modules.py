"""A module that was edited: engines run the version that the notebook has loaded, or say why they cannot."""

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.extensions.autoreload import ModuleReloader
from torch import nn

import workbench as wb
from tests.session.simulated_session import SimulatedSession
from tests.session.test_verdicts import nobody_listens
from workbench.errors import CellError, SessionError
from workbench.session import user_modules
from workbench.session.comparison import training_on_engine
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.session.on_engine.recovery import Recovery, _random_states
from workbench.tensors.world import current
from workbench.testing import run_ranks

__all__ = ["nobody_listens"]  # a fixture
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with modules of a user's, which this process can import."""
    write(tmp_path, edited_models=MODELS.format(hidden=OLD), edited_trainer=TRAINER, edited_lazy=LAZY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    user_modules.watch()
    yield tmp_path
    forget()


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]


def load(name: str) -> Any:
    return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)


@pytest.fixture
def pack_in_notebook(monkeypatch):
    """``pack`` of a notebook that has loaded the present files. This process is then an engine that has not."""

    def pack(value: Any) -> bytes:
        names = filter(re.compile("edited_").match, user_modules.loaded())
        versions = {name: user_modules._version_of(name, sys.modules[name].__spec__) for name in names}
        with monkeypatch.context() as patched:
            patched.setattr(user_modules, "loaded", lambda: versions)
            return user_modules.pack(value)

    return pack


def unpack(payload: bytes) -> Any:
    return user_modules.unpack(payload)[0]


def write_package(folder: Path, **modules: str) -> None:
    folder.mkdir(exist_ok=True)
    write(folder, **modules)


def test_a_value_comes_back(folder):
    make = load("edited_models").make
    payload = user_modules.pack(({"a": [1, 2]}, make, lambda: make()))
    value, same, by_value = unpack(payload)
    assert value == {"a": [1, 2]} and same is make and by_value()[0].out_features == OLD


def test_an_older_module_is_imported_anew_with_those_that_use_it(folder, pack_in_notebook):
    trainer, lazy = load("edited_trainer"), load("edited_lazy")
    old = trainer.make()
    payload = user_modules.pack((trainer.width, lazy.width))
    assert [width() for width in unpack(payload)] == [OLD, OLD]
    assert sys.modules["edited_trainer"] is trainer
    write(folder, edited_models=MODELS.format(hidden=NEW))
    value, renewed = user_modules.unpack(pack_in_notebook((trainer.width, lazy.width)))
    assert [width() for width in value] == [NEW, NEW]
    assert sorted(renewed) == ["edited_models", "edited_trainer"]
    assert sys.modules["edited_trainer"] is not trainer and sys.modules["edited_lazy"] is lazy
    assert old[0].out_features == OLD and trainer.width() == OLD  # what was made before stays


@pytest.mark.parametrize("init", ["from edited_pkg import parts, rest", "from edited_pkg.parts import size", None])
def test_the_edited_parts_of_a_package_are_imported_anew(folder, pack_in_notebook, init):
    """A package that has a function of an edited part is a user of it; one that has the part itself stays as it is.
    Without ``__init__.py`` it is a namespace package. Two of its parts import each other.
    """
    package, parts = folder / "edited_pkg", "from edited_pkg import user\ndef size(): return {}"
    write_package(package, parts=parts.format(1), rest="", user="from edited_pkg import parts")
    if init is not None:
        write(package, __init__=init)
    user, rest = load("edited_pkg.user"), load("edited_pkg.rest")
    old = sys.modules["edited_pkg"]
    write(package, parts=parts.format(22))
    assert unpack(pack_in_notebook(lambda: user.parts.size()))() == 22
    new = sys.modules["edited_pkg"]
    assert new.parts.size() == new.user.parts.size() == 22 and new.rest is rest is sys.modules["edited_pkg.rest"]
    assert (new is old) == (init is None or "size" not in init)


def test_a_function_in_the_place_of_its_module_is_the_new_one(folder, pack_in_notebook):
    package = folder / "edited_pkg"
    write_package(
        package, __init__="from .size import size\nimport edited_pkg.rest", size="def size(): return 1", rest=""
    )
    size, rest = load("edited_pkg").size, sys.modules["edited_pkg.rest"]
    write(package, size="def size(): return 22")
    assert unpack(pack_in_notebook(sys.modules["edited_pkg"])).size() == 22 and size() == 1
    assert sys.modules["edited_pkg"].size() == 22 and sys.modules["edited_pkg"].rest is rest


def test_a_request_that_uses_no_edited_module_changes_none(folder, pack_in_notebook):
    write(folder, edited_other="class Config: pass")
    models, trainer, other = load("edited_models"), load("edited_trainer"), load("edited_other")
    write(folder, edited_models=MODELS.format(hidden=NEW))

    def in_a_cell() -> int:
        return 1

    in_a_cell.__module__ = "__main__"
    for value in (1, {"x": torch.ones(2)}, other.Config(), in_a_cell):
        assert user_modules.unpack(pack_in_notebook(value))[1] == []
    assert sys.modules["edited_models"] is models and sys.modules["edited_trainer"] is trainer


def test_imports_in_functions_count(folder, pack_in_notebook):
    def in_a_cell() -> int:
        from edited_models import HIDDEN

        return HIDDEN

    in_a_cell.__module__ = "__main__"  # it travels by value
    package = folder / "edited_pkg"
    write_package(
        package,
        parts="SIZE = 1",
        lazy="import torch\n@torch.no_grad()\ndef size():\n    from . import parts\n    return parts.SIZE",
    )
    load("edited_models"), load("edited_pkg.parts")
    size = load("edited_pkg.lazy").size
    write(folder, edited_models=MODELS.format(hidden=NEW))
    write(package, parts="SIZE = 22")
    in_cell, late = unpack(pack_in_notebook((in_a_cell, size)))
    assert (in_cell(), late()) == (NEW, 22)


def test_comments_and_formatting_are_no_difference(folder, pack_in_notebook):
    models = load("edited_models")
    write(folder, edited_models="# a comment\n" + MODELS.format(hidden=f"( {OLD} )"))
    assert user_modules.unpack(pack_in_notebook(models.make)) == (models.make, [])
    forget()
    load("edited_models")
    write(folder, edited_models=MODELS.format(hidden=OLD))
    assert user_modules.unpack(pack_in_notebook(models.Net))[1] == []


def test_modules_that_load_at_their_first_use_stay_unloaded(folder):
    """As those of ``importlib.util.LazyLoader``; the file of this one leaves a mark."""
    write(folder, edited_lazy="import sys; sys.modules['edited_mark'] = sys", edited_trainer="def width(): return 1")
    trainer = load("edited_trainer")
    spec = importlib.util.find_spec("edited_lazy")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    trainer.lazy = sys.modules["edited_lazy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer.lazy)

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    sys.modules["edited_odd"] = Odd()
    assert unpack(user_modules.pack(trainer.width))() == 1
    user_modules.import_edited_anew()
    assert "edited_mark" not in sys.modules


def test_a_notebook_that_has_not_loaded_the_present_file_is_refused(folder):
    """The engine is new, for example: it imports the file as it is."""
    payload = user_modules.pack(load("edited_trainer").width)
    forget()
    write(folder, edited_models=MODELS.format(hidden=NEW))
    with pytest.raises(SessionError, match=r"module edited_models: .*edited_models.py of .*%autoreload 2"):
        user_modules.unpack(payload)
    assert unpack(user_modules.pack(load("edited_trainer").width))() == NEW


def test_modules_that_a_request_does_not_use_may_differ(folder):
    write(folder, edited_other="def one(): return 1")
    load("edited_models")
    payload = user_modules.pack(load("edited_other").one)
    forget()
    write(folder, edited_models=MODELS.format(hidden=NEW))
    load("edited_models")
    assert unpack(payload)() == 1


def present(name: str) -> str:
    return user_modules._digest(name)


def test_an_edit_after_the_import_is_not_the_version_that_was_loaded(folder):
    module = load("edited_models")
    write(folder, edited_models=MODELS.format(hidden=NEW))
    assert user_modules.loaded()["edited_models"].digest != present("edited_models")
    load("edited_models")
    assert user_modules.loaded()["edited_models"].digest == present("edited_models")
    user_modules.import_edited_anew()
    assert sys.modules["edited_models"] is module
    write(folder, edited_models=MODELS.format(hidden=OLD))
    user_modules.import_edited_anew()
    assert sys.modules["edited_models"] is not module and sys.modules["edited_models"].HIDDEN == OLD


@pytest.fixture
def reloader(monkeypatch):
    """The records of ``%autoreload 2`` in a notebook."""
    found = ModuleReloader()
    magics = {"AutoreloadMagics": SimpleNamespace(_reloader=found)}
    shell = SimpleNamespace(magics_manager=SimpleNamespace(registry=magics))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    return found


DECORATED = "import torch\n@torch.no_grad()\ndef make(): return {size}"


@pytest.mark.parametrize("edit", ["a decorated function", "a comment", "an error"])
def test_a_module_that_autoreload_has_changed_in_its_place_is_of_the_present_file(folder, reloader, edit):
    write(folder, edited_models=DECORATED.format(size=1))
    module = load("edited_models")
    reloader.check(check_all=True)
    first = user_modules.loaded()["edited_models"]
    edited = {"a decorated function": DECORATED.format(size=22), "a comment": f"#\n{DECORATED.format(size=1)}"}
    write(folder, edited_models=edited.get(edit, "def make(:"))
    os.utime(first.file, (first.time_s + 1, first.time_s + 1))
    assert user_modules.loaded()["edited_models"] == first  # an edit alone does not count
    reloader.check(check_all=True)
    second = user_modules.loaded()["edited_models"]
    assert sys.modules["edited_models"] is module
    assert (second == first) == (edit == "an error") and (second.digest == present("edited_models")) == (
        second != first
    )
    assert (second.digest == first.digest) == (edit != "a decorated function")
    write(folder, edited_models=DECORATED.format(size=333))
    assert user_modules.loaded()["edited_models"] == second


def test_values_of_an_edited_module_are_recovered(folder):
    """Also those in lists and attributes; classes, functions and the module itself are those of now on all ranks."""
    text = """
class Size:
    def __init__(self, number): self.number = number
    def doubled(self): return {factor} * self.number
def make(): return {factor}
"""
    write(folder, edited_sizes=text.format(factor=2))
    sizes = load("edited_sizes")
    shared = {"Size": sizes.Size, "make": sizes.make, "sizes": sizes}
    outer = [sizes.Size(1) for _ in range(3)]
    for size in outer:
        size.parts = [{"a": sizes.Size(7)}]
    write(folder, edited_sizes=text.format(factor=2000))
    user_modules.import_edited_anew()
    new = sys.modules["edited_sizes"]

    def program(rank):
        kept = {**shared, "outer": outer[rank], "listed": [outer[rank]]}
        namespace = {} if rank == 1 else dict(kept)
        rows = Recovery(namespace, {}, kept, [1], current()).run(_random_states(current()))
        assert dict(rows) == dict.fromkeys(kept, "rank 0")
        return namespace

    for has in run_ranks(program, 3):
        assert has["Size"] is new.Size and has["make"] is new.make and has["sizes"] is new
        assert type(has["outer"]) is type(has["listed"][0]) is new.Size
        assert has["outer"].doubled() == 2000 and has["outer"].parts[0]["a"].doubled() == 14000


def test_only_modules_of_the_users_count(folder):
    load("edited_models")
    names = user_modules.loaded()
    assert "edited_models" in names and __name__ in names
    assert not {name.partition(".")[0] for name in names} & {"torch", "workbench", "json", "pytest", "__main__"}


@pytest.mark.parametrize("is_lost", [True, False])
def test_all_engines_get_a_job_again_after_an_edit(folder, monkeypatch, is_lost):
    make = load("edited_models").make
    data = torch.randn(32, 4), torch.randn(32, 2)
    session: Any = SimulatedSession()
    subject = Subject.of(make, data, nn.functional.mse_loss, batch_size=16, steps=3)
    with Comparison(session, subject) as comparison:
        sent = []

        def play(function: Any, *args: Any, ranks: Any = None) -> list[Any]:
            if function is training_on_engine.has_job:
                return [True, not is_lost]
            sent.append((function.__name__, ranks))
            return [training_on_engine.Prepared(1)] * len(ranks)

        monkeypatch.setattr(comparison, "_on_engines", play)
        comparison.prepare()
        to_new = [("keep_job", [1])] * is_lost
        assert sent == to_new
        write(folder, edited_models=MODELS.format(hidden=NEW))
        load("edited_models")
        comparison.prepare()
        comparison.prepare()
        assert sent == [*to_new, ("keep_job", [0, 1]), ("forget_one_device", [0]), *to_new]


@pytest.mark.usefixtures("nobody_listens")
def test_an_open_comparison_trains_one_device_again_after_an_edit(folder):
    """Also where the model's function is one of a cell, which imports the model late."""

    def make() -> nn.Module:
        from edited_models import Net

        torch.manual_seed(0)
        return Net()

    load("edited_models")
    data = torch.randn(32, 4), torch.randn(32, 2)
    session: Any = SimulatedSession()
    subject = Subject.of(make, data, nn.functional.mse_loss, batch_size=16, steps=3)
    with Comparison(session, subject) as comparison:
        old = comparison.baseline()
        assert comparison.baseline() is old
        write(folder, edited_models=MODELS.format(hidden=NEW))
        assert comparison.baseline() is old
        before = comparison.start("data")
        load("edited_models")
        after = comparison.start("data")
        assert after.result().equal and before.result().equal is None
        new = comparison.baseline()
        held = [record.memory_by_kind[0]["parameters"] for record in (old, before.result(), new, after.result())]
        assert new.losses != old.losses and held[0] == held[1] < 100 * held[0] < held[2] == held[3]


@pytest.mark.engines
def test_a_comparison_after_an_edit_trains_the_new_model(session, folder):
    """As with ``%autoreload 2`` in a notebook: the cell runs again after an edit."""

    session.run(f"import sys\nsys.dont_write_bytecode = True\nsys.path.insert(0, {str(folder)!r})")
    data = torch.randn(32, 4), torch.randn(32, 2)

    def compared():
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
    call = session.submit(load("edited_models").make, ranks=[0])
    assert call.result()[0][0].out_features == OLD
    said = "[0] workbench: a request to some of the ranks imported edited_models anew, after an edit. Other ranks keep"
    assert [session.run("pass").text.startswith(said), session.run("pass").text] == [True, ""]
    call = session.submit(load("edited_models").make)
    assert [model[0].out_features for model in call.result()] == [OLD, OLD]
