"""Which modules are the blocks that recompute, ZeRO 3, predictions and exports go by."""

import pytest
from torch import nn

from tests.training.models import make
from workbench.training.recompute import blocks_of
from workbench.training.strategies.blocks import numbered_blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Holder(nn.Module):
    """Blocks held in the container that ``hold`` makes, or as attributes."""

    def __init__(self, hold=None, count=4):
        super().__init__()
        self.parts = [Block() for _ in range(count)]
        for number, part in enumerate(self.parts) if hold is None else ():
            self.add_module(f"block{number}", part)
        self.head = nn.Linear(4, 2)
        if hold is not None:
            self.layers = hold(self.parts)


def _dict(parts):
    return nn.ModuleDict({str(number): part for number, part in enumerate(parts)})


@pytest.mark.parametrize(
    "hold",
    [
        nn.ModuleList,
        _dict,
        None,
        lambda parts: nn.ModuleList([nn.ModuleList(parts[:2]), nn.ModuleList(parts[2:])]),
        lambda parts: nn.ModuleDict({"tok": nn.Embedding(2, 2), "h": nn.ModuleList(parts)}),
        lambda parts: nn.ModuleDict({"here": _dict(parts[:2]), "there": _dict(parts[2:])}),
    ],
    ids=["list", "dict", "attributes", "lists in a list", "list in a dict", "dicts in a dict"],
)
def test_blocks_are_found_in_each_way_of_holding_them(hold):
    model = Holder(hold)
    assert blocks_of(model) == model.parts


def test_members_of_a_dict_of_several_classes_are_no_blocks():
    towers = nn.ModuleDict({"text": Holder(nn.ModuleList), "image": make("encoder")})
    assert blocks_of(towers) == [*towers["text"].parts, *towers["image"].enc.layers]


def test_a_chain_of_layers_has_its_layers_as_blocks():
    cnn = make("cnn")
    assert blocks_of(cnn) == [cnn.conv1, cnn.bn1, cnn.conv2, cnn.bn2, cnn.fc1, cnn.fc2]


def test_layers_have_the_numbers_of_their_blocks():
    model = Holder(nn.ModuleList, count=12)  # layers.1 is no part of layers.11's path
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert numbered_blocks(model, [*names, "(root)"]) == (-1, *(number for number in range(12) for _ in "ab"), -1)
