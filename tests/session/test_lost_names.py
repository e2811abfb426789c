"""Cells that a replaced rank cannot run are refused, and no others."""

import pytest

from workbench.errors import CellError
from workbench.session.lost_names import explain_lost_names, first_reads, refuse_lost_names
from workbench.session.protocol import Failure


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("loss = model(x)\nprint(loss)", ["model", "x", "print"]),
        ("step += 1", ["step"]),
        ("model = make()\nmodel.train()", ["make"]),
        ("import torch.nn as nn\nnn.Linear(2, n)", ["n"]),
        ("def train():\n    model()\ntrain()", []),
        ("if 'model' not in globals():\n    model = 1\nmodel", ["globals"]),
        ("try:\n    model\nexcept NameError:\n    model = 1\nmodel", []),
        ("for i in range(n):\n    total = step(i)\ntotal", ["range", "n", "step"]),
        ("with no_grad() as g:\n    y = f(g)", ["no_grad", "f"]),
        ("found = wb.rank() == 0 and print(model)", ["wb"]),
        ("[f(x) for x in xs]; (lambda: z)", ["xs"]),
        ("# %%global\n%timeit x\n!ls", ["get_ipython"]),
        ("@jit\nclass A: pass\nA()", ["jit"]),
        ("x: int\ny: int = z\nif (n := len(y)): n", ["z", "len"]),
        ("x\nfrom math import *\nsqrt(4.0)", ["x"]),
        ("exec(text)\nhelper", ["exec", "text"]),
        ("if flag:\n    from math import *\nsqrt(4.0)", ["flag"]),
        ("%run defs.py\nhelper", ["get_ipython"]),
        ("globals().update(x=1)\nx", ["globals"]),
        ("match x:\n    case [a, *b]: pass\n    case {'k': c, **d}: pass\nprint(a, b, c, d)", ["print"]),
        ("ok and (n := 3)\nn", ["ok"]),
        ("any((hit := x) for x in xs)\nhit, x, y", ["any", "xs", "y"]),
        ("x\ndef build():\n    global model, x\nbuild()\nmodel, y", ["x", "y"]),
        ("class A:\n    def f(self):\n        global n\n        n = 1\nA().f()\nn", []),
        ("if big:\n    def f():\n        global n\nn", ["big"]),
        ("def put(): globals()['n'] = 3\nput()\nn", []),
        ("locals()['n'] = y\nn", ["y", "locals"]),
        ("vars(a)\nvars().update(n=1)\nn", ["vars", "a"]),
        ("get_ipython().user_ns['n'] = y\nn", ["y", "get_ipython"]),
        ("get_ipython().push({'n': y})\nn", ["get_ipython"]),
        ("files = !ls\nn", ["get_ipython", "n"]),
        ("for x in xs:\n    if x: break\nelse:\n    y = z\nprint(x, y)", ["xs", "print"]),
        ("assert ok, message(n := 3)\nn, k", ["ok", "k"]),
        ("low < x < (top := high)\ntop", ["low", "x"]),
    ],
)
def test_names_that_a_cell_is_sure_to_read(code, names):
    assert first_reads(code) == names


def test_a_cell_that_a_replaced_rank_cannot_run_is_refused():
    names = {0: ["model", "optimizer", "x"], 1: ["x"], 2: ["model", "optimizer", "x"]}
    code = "optimizer.zero_grad(); model(x); other"
    with pytest.raises(
        CellError,
        match=r"(?s)rank 1 has no variables optimizer, model: its engine is new. Rank 0 .*"
        r"Nothing ran on any rank.*%workbench recover",
    ):
        refuse_lost_names(code, [0, 1, 2], {1}, names.get)
    refuse_lost_names(code, [0, 2], {1}, names.get)
    refuse_lost_names(code, [1], {1}, names.get)
    refuse_lost_names(code, [0, 1, 2], {1}, {0: names[0], 1: None}.get)
    refuse_lost_names("model = make()", [0, 1, 2], {1}, names.get)
    refuse_lost_names(code, [0, 1], set(), lambda rank: pytest.fail("asked without a reason"))


def test_a_missing_name_of_a_replaced_rank_is_explained():
    failure = Failure("NameError", "name 'x' is not defined", (), 0.0)
    found = explain_lost_names({0: Failure("ValueError", "y", (), 0.0), 1: failure}, {1}, lambda: ["x"])
    assert found[0].message == "y" and found[1].message.endswith(
        "its engine is new; %workbench recover brings variables back"
    )
    assert explain_lost_names({1: failure}, {1}, lambda: ["xs"])[1] == failure  # no rank has it
    assert explain_lost_names({1: found[0]}, {1}, lambda: pytest.fail("asked without a reason"))[1] == found[0]
