"""Values in the form that the notebook gets."""

from __future__ import annotations

from typing import Any

import torch

from workbench.session import protocol
from workbench.session.on_engine.displayed_values import portable


def test_values_that_contain_themselves() -> None:
    """A cell that ended with one failed in code of the workbench, though it had run."""
    weights = torch.ones(2, requires_grad=True)
    nodes: list[Any] = [weights]
    tree: dict[str, Any] = {"nodes": nodes}
    pair = (tree, nodes)
    tree["self"], tree["pair"] = tree, pair
    nodes.append(pair)
    copy, copied_nodes = protocol.load(protocol.dump(portable(pair, collective=False)))
    assert copy["self"] is copy and copy["nodes"] is copied_nodes is copied_nodes[1][1]
    assert not copied_nodes[0].requires_grad and copied_nodes[1][0] is copy and copy["pair"][0] is copy
