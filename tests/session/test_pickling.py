"""What travels of a tensor: its elements, and not the rest of its storage."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

from workbench.errors import SessionError
from workbench.session import protocol, user_modules
from workbench.session.on_engine import sent_values

WHOLE = torch.arange(500_000, dtype=torch.float64).reshape(1000, 500)
VIEWS = {
    "rows": lambda x: x[:2],
    "columns": lambda x: x[:, :3],
    "a step": lambda x: x[::100, ::2],
    "transposed": lambda x: x[:4].t(),
    "a number": lambda x: x[3, 4],
    "nothing": lambda x: x[:0],
    "expanded rows": lambda x: x[:1].expand(5000, 500),
    "other dtype": lambda x: x[:2].view(torch.int32),
    "windows": lambda x: x[0].unfold(0, 10, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_travels_without_the_rest_of_its_storage(name):
    view = VIEWS[name](WHOLE)
    payload = protocol.dump(view)
    assert len(payload) < 50_000 < WHOLE.nbytes
    assert torch.equal(protocol.load(payload), view)


def test_a_view_keeps_what_it_is_besides_its_elements():
    view = WHOLE[:2].detach().requires_grad_()
    view.label = "first rows"
    back = protocol.load(protocol.dump([view, view]))
    assert back[0] is back[1] and back[0].requires_grad and back[0].label == "first rows"
    assert view.untyped_storage().nbytes() == WHOLE.nbytes  # the sender's is as it was
    assert protocol.load(protocol.dump(WHOLE[:4].t())).stride() == (1, 500)


def test_a_view_of_complex_numbers_keeps_its_conjugates():
    view = torch.view_as_complex(WHOLE.reshape(-1, 2)).conj()[:3]
    payload = protocol.dump(view)
    assert len(payload) < 5000 and torch.equal(protocol.load(payload), view)


def test_parameters_that_are_views_of_one_flat_tensor_travel_as_their_elements():
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(WHOLE[:3, :2])
    layer.other = layer.weight
    payload = protocol.dump(layer)
    back = protocol.load(payload)
    assert len(payload) < 20_000
    assert type(back.weight) is nn.Parameter and back.other is back.weight
    assert torch.equal(back.weight, layer.weight)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(1).expand(100_000),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "expanded", "sparse"],
)
def test_other_tensors_travel_as_before(value):
    payload = protocol.dump(value)
    back = protocol.load(payload)
    assert len(payload) < 5000
    assert torch.equal(back.to_dense(), value.to_dense())


def test_a_tensor_without_data_travels():
    back = protocol.load(protocol.dump(torch.zeros(1000, 1000, device="meta")[:2]))
    assert back.shape == (2, 1000) and back.device.type == "meta"


def test_a_view_of_a_large_tensor_comes_back_with_a_cell_and_after_a_loss():
    view = torch.zeros(protocol.MAX_VALUE_BYTES, dtype=torch.int16)[:4]
    assert torch.equal(protocol.load(protocol.dump_or_omit(view)), view)
    packed = sent_values.pack({"rows": view}, {})
    assert isinstance(packed, bytes) and torch.equal(sent_values.unpack(packed, {})["rows"], view)


def test_data_with_missing_values_are_the_same_on_all_ranks():
    """A recovery said that they differ, and left them out."""
    known, other = torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.nan])
    assert sent_values.is_same({"x": [known]}, {"x": [known.clone()]})
    assert not any(
        sent_values.is_same(known, each) for each in (other, known.double(), known[None], known.nan_to_num())
    )


def test_a_variable_that_cannot_be_pickled_is_named():
    with pytest.raises(SessionError, match=r"push data: the variable 'data', a generator, cannot be pickled \(cannot"):
        user_modules.pack_variables({"fine": 3, "data": (x for x in "ab")})


def test_a_function_travels_to_engines_that_do_not_know_its_folder_yet(tmp_path, monkeypatch):
    """A cell has changed the search path, or the notebook's folder, since the session's start."""
    (tmp_path / "added_later.py").write_text("def answer():\n    return 42\n")
    user_modules.watch()
    with monkeypatch.context() as notebook:
        notebook.chdir(tmp_path)
        notebook.syspath_prepend("")
        payload = user_modules.pack(importlib.import_module("added_later").answer)
    del sys.modules["added_later"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert str(tmp_path) not in sys.path
    assert user_modules.unpack(payload)[0]() == 42
    del sys.modules["added_later"]
