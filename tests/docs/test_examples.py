"""The examples (``>>>``) in the pages of docs run unchanged, on one of several simulated ranks."""

import doctest

import pytest
import torch

import workbench as wb
from tests.docs.pages import PAGES, name_of
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.transport.threads import ThreadHub, ThreadTransport

WITH_EXAMPLES = [page for page in PAGES if "\n    >>> " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples(page):
    """One rank of four: examples that box would wait for the others."""
    test = doctest.DocTestParser().get_doctest(
        page.read_text("utf-8"), {"wb": wb, "torch": torch}, page.name, str(page), 0
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failures: list[str] = []
    with Simulated(World(0, 4, torch.device("cpu"), ThreadTransport(ThreadHub(4), 0))):
        runner.run(test, out=failures.append)
    assert runner.tries > 0 and not failures, "".join(failures)
