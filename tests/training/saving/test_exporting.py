"""Weights as safetensors: what transformers and the safetensors library read, and what no rank ever holds."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError, LayoutError
from workbench.testing import run_ranks
from workbench.training import exporting


class Mixed(nn.Module):
    """Several dtypes and odd sizes, a tied weight, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.half = nn.Linear(5, 3).to(torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


STATE = Mixed().state_dict()


def spread(strategy):
    model = Mixed()
    model.load_state_dict(STATE)
    return wb.parallelize(model, strategy)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("*: data", 1), ("*: model", 3), ("*: data | 1x2x1 zero=3", 2), ("embed: data@0; norm: data@1; half: model@1", 4)],
)
@pytest.mark.parametrize("limit", [10**9, 120])
def test_any_strategy_gives_the_logical_weights(tmp_path, strategy, num_ranks, limit):
    run_ranks(
        lambda: wb.checkpoint.export_safetensors(spread(strategy), tmp_path, max_shard_bytes=limit) and None, num_ranks
    )
    found = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
    assert found.keys() == STATE.keys() - {"head.weight"}
    for name, value in found.items():
        assert torch.equal(value, STATE[name]) and value.dtype == STATE[name].dtype, name
    files = sorted(path.name for path in tmp_path.iterdir())
    if limit > 1000:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys() and set(index["weight_map"].values()) < set(files)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_it_loads_back_under_another_strategy(tmp_path):
    run_ranks(lambda: wb.checkpoint.export_safetensors(spread("*: model"), tmp_path, max_shard_bytes=200) and None, 2)

    def program():
        model = spread("embed: data@0; norm: data@1; half: data@2")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        wb.checkpoint.load_safetensors(model, tmp_path)
        everywhere = wb.placement("cpu", ranks=[0, 1, 2])
        return [p.to_global(placement=everywhere, sbp="B").to_local().clone() for p in model.parameters()]

    truth = Mixed()
    truth.load_state_dict(STATE)
    for values in run_ranks(program, 3):
        assert all(torch.equal(a, b) for a, b in zip(values, truth.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3", "pipeline"])
def test_load_model_of_safetensors_loads_or_says_what_does(strategy, tmp_path):
    built = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    file = tmp_path / "model.safetensors"
    save_file({name: value + 1 for name, value in built.state_dict().items()}, file)

    def program():
        model = wb.parallelize(copy.deepcopy(built), strategy)
        if strategy == "*: data":
            load_model(model, file)
        else:
            for call in (load_model, save_model):
                with pytest.raises(LayoutError, match=r"global tensor of shape \(.*wb\.checkpoint\.load_safetensors"):
                    call(model, file)
            wb.checkpoint.load_safetensors(model, file)
        return {name: value.full_tensor() for name, value in model.state_dict().items()}

    found = run_ranks(program, 2)[1]
    assert all(torch.equal(value, built.state_dict()[name] + 1) for name, value in found.items())


def test_earlier_weights_go_and_files_are_shared_out(tmp_path, monkeypatch):
    writers = []
    header = exporting._header
    monkeypatch.setattr(exporting, "_header", lambda file, tensors: writers.append(wb.rank()) or header(file, tensors))
    run_ranks(lambda: wb.checkpoint.export_safetensors(spread("*: data"), tmp_path, max_shard_bytes=60) and None, 2)
    assert set(writers) == {0, 1}
    assert len(list(tmp_path.glob("model-*.safetensors"))) == len(writers) > 2
    run_ranks(lambda: wb.checkpoint.export_safetensors(spread("*: data"), tmp_path) and None, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_transformers_loads_it_and_gives_the_same_logits(tmp_path, limit):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=12)
    one = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(8).view(1, 8)
    expected = one(ids).logits

    def program():
        model = copy.deepcopy(one).train()  # transformers swaps torch's initializers meanwhile, for all threads
        wb.parallelize(model, "*: data; *.h.*: model")
        wb.checkpoint.export_safetensors(model, tmp_path, max_shard_bytes=limit)

    run_ranks(program, 2)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is transformers.GPT2LMHeadModel and not told["missing_keys"] and not told["unexpected_keys"]
    torch.testing.assert_close(loaded.eval()(ids).logits, expected, rtol=0, atol=0)


def test_what_safetensors_cannot_hold(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(CheckpointError, match=r"_extra_state is a dict.*wb\.checkpoint\.save"):
        wb.checkpoint.export_safetensors(Extra(1, 1), tmp_path)
    with pytest.raises(CheckpointError, match=r"complex128.*Cast it"):
        wb.checkpoint.export_safetensors(nn.Linear(1, 1, dtype=torch.complex128), tmp_path)


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    """Else its first files would stand beside others of the earlier one, under the same index."""
    run_ranks(lambda: wb.checkpoint.export_safetensors(spread("*: data"), tmp_path, max_shard_bytes=60) and None, 2)
    before, header = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, exporting._header

    def fill_the_disk(file, tensors):
        if file.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")
        return header(file, tensors)

    def program():
        model = spread("*: data")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            wb.checkpoint.export_safetensors(model, tmp_path, max_shard_bytes=60)

    monkeypatch.setattr(exporting, "_header", fill_the_disk)
    run_ranks(program, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path):
    (tmp_path / "file").touch()

    def program():
        with pytest.raises((OSError, CheckpointError), match="file"):
            wb.checkpoint.export_safetensors(spread("*: data"), tmp_path / "file")

    run_ranks(program, 2)
