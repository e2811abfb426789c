"""The examples in the pages of docs run as they are written, on one of several simulated ranks."""

import doctest
import re
from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.runtime.transport.threads import ThreadHub, ThreadTransport
from workbench.runtime.world import Simulated, World

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if ">>> " in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page):
    """One rank of four: examples that box would wait for the others."""
    test = doctest.DocTestParser().get_doctest(page.read_text(), {"wb": wb, "torch": torch}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failures: list[str] = []
    with Simulated(World(0, 4, torch.device("cpu"), ThreadTransport(ThreadHub(4), 0))):
        runner.run(test, out=failures.append)
    assert runner.tries > 0 and not failures, "".join(failures)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / name).exists(), name
