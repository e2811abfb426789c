"""Models built on meta: storage and values shard by shard, the same for every strategy."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.models.zoo import make
from workbench.errors import CheckpointError, StrategyError
from workbench.testing import run_ranks


def small(device="meta"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7), nn.LayerNorm(7))


def on_meta(model):
    """The same architecture without storage."""
    with torch.device("meta"):
        return type(model)(model.config).train()


def logical(model):
    return {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


STRATEGIES = [("*: data", 1), ("*: data", 2), ("*: model", 3), ("0: data; 3: model@1 | 2x1x2", 4)]


def test_values_follow_the_logical_position_under_every_strategy():
    def program(rank, strategy, models):
        torch.manual_seed(rank)  # what is drawn comes from the world's generator alone
        return logical(wb.parallelize(models[rank], strategy))

    states = []
    for strategy, num_ranks in STRATEGIES:
        models = [small() for _ in range(num_ranks)]
        states += run_ranks(lambda rank, s=strategy, m=models: program(rank, s, m), num_ranks)
    for state in states[1:]:
        assert_same(state, states[0])
    weight = states[0]["0.weight"]
    assert 0.3 < weight.abs().max() <= 6**-0.5 and len(weight.unique()) > 40
    assert states[0]["1.running_var"].eq(1).all() and states[0]["1.num_batches_tracked"] == 0


def test_no_rank_allocates_more_than_its_shards():
    models = [small() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "0: data; 3: model@1")
        return {name: p.to_local().untyped_storage().nbytes() for name, p in model.named_parameters()}

    first, second = run_ranks(program, 2)
    assert first["0.weight"] == 6 * 8 * 4 and second["0.weight"] == 0
    assert first["3.weight"] == 0 and second["3.weight"] == 7 * 8 * 4


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_transformers_on_meta_are_initialised_as_they_say(name):
    model = make(name, "sdpa")
    copies = [on_meta(model) for _ in range(3)]
    ids = torch.arange(12).view(2, 6)

    def program(rank, strategy, models):
        found = wb.parallelize(models[rank], strategy)
        return logical(found), whole(found(ids).logits)

    (alone, logits), *_ = run_ranks(lambda rank: program(rank, "*: data", copies[2:]), 1)
    for state, output in run_ranks(lambda rank: program(rank, "*: model", copies[:2]), 2):
        assert_same(state, alone)
        torch.testing.assert_close(output, logits, rtol=1e-4, atol=1e-5)
    rotary = {n: t for n, t in model.named_buffers() if "inv_freq" in n}
    assert_same({n: alone[n] for n in rotary}, rotary)
    table = alone["transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"]
    assert table.std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "by_index"),
    [
        ("*: model", 3, True),
        pytest.param("*: data", 2, False, marks=pytest.mark.slow),
        pytest.param("*: model", 2, False, marks=pytest.mark.slow),
        pytest.param("*: model | 1x2x2 zero=3", 4, True, marks=pytest.mark.slow),
    ],
)
def test_files_are_loaded_shard_by_shard(tmp_path, strategy, num_ranks, by_index):
    model = make("gpt2", "sdpa")
    write(model, tmp_path, by_index)
    copies = [on_meta(model) for _ in range(num_ranks)]

    def program(rank):
        found = wb.parallelize(copies[rank], strategy, init=tmp_path)
        assert found.lm_head.weight is found.transformer.wte.weight
        return logical(found)

    for state in run_ranks(program, num_ranks):
        assert_same(state, dict((*model.named_parameters(), *model.named_buffers())))


def write(model, directory, by_index=False):
    """What ``save_pretrained`` writes: each tied weight once; by index in two files."""
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if not by_index:
        save_file(state, directory / "model.safetensors")
        return
    where = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(state)}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in state.items() if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_rotary_frequencies_are_computed_when_weights_come_from_a_file(tmp_path):
    model = make("llama", "sdpa")
    model.save_pretrained(tmp_path)
    copies = [on_meta(model) for _ in range(2)]
    ids = torch.arange(12).view(2, 6)
    expected = model(ids).logits

    def program(rank):
        found = wb.parallelize(copies[rank], "*: data; model.layers.1: data@1", init=str(tmp_path))
        return whole(found(ids).logits)

    for logits in run_ranks(program, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["fp16 file", "plain module", "bare model"])
def test_files_of_another_dtype_or_form(tmp_path, layout):
    model = make("gpt2", "sdpa")
    state = {name: tensor.detach().half() for name, tensor in model.named_parameters()}
    if layout == "bare model":
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "x.safetensors")
    targets = [make("gpt2", "sdpa") for _ in range(2)]
    for target in targets:
        nn.init.zeros_(target.transformer.wte.weight)

    def program(rank):
        found = targets[rank] if layout == "plain module" else wb.parallelize(targets[rank], "*: model")
        return logical(wb.checkpoint.load_safetensors(found, tmp_path / "x.safetensors"))

    for found in run_ranks(program, 2):
        assert_same(found, {name: p.detach().half().float() for name, p in model.named_parameters()})


def test_what_does_not_fit_is_listed_at_once(tmp_path):
    state = {name: torch.zeros(tensor.shape) for name, tensor in small("cpu").state_dict().items()}
    del state["3.weight"], state["4.bias"]
    state.update({"0.weight": torch.zeros(6, 8), "5.extra": torch.zeros(2)})
    save_file(state, tmp_path / "model.safetensors")

    def program(rank):
        with pytest.raises(CheckpointError) as caught:
            wb.parallelize(models[rank], "*: model", init=tmp_path)
        return str(caught.value)

    models = [small() for _ in range(2)]
    for text in run_ranks(program, 2):
        for part in (
            "2 missing in the file: 3.weight, 4.bias",
            "1 not in the module: 5.extra",
            "0.weight (8, 6), in the",
        ):
            assert part in text
    with pytest.raises(CheckpointError, match="on meta, without storage"):
        wb.checkpoint.load_safetensors(small(), tmp_path, strict=False)


def test_experts_are_read_with_the_names_of_the_module(tmp_path):
    """Files of ``save_pretrained`` have a tensor for each expert, and the error says how to save one for all."""
    model = make("mixtral")
    model.save_pretrained(tmp_path / "each")
    with pytest.raises(CheckpointError, match=r"not in the module(.|\n)*save_original_format=False"):
        wb.checkpoint.load_safetensors(make("mixtral"), tmp_path / "each")
    model.save_pretrained(tmp_path / "all", save_original_format=False)
    models = [on_meta(model) for _ in range(2)]
    for found in run_ranks(lambda rank: logical(wb.parallelize(models[rank], "*: expert", init=tmp_path / "all")), 2):
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "is cut short"),
        ("garbage", "no safetensors file"),
        ("nothing", "holds 0 .safetensors files"),
        ("index", "1 are not there: model-9.safetensors"),
    ],
)
def test_damaged_files_are_errors_on_all_ranks(tmp_path, damage, message):
    path = tmp_path / "model.safetensors"
    save_file(small("cpu").state_dict(), path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "garbage":
        path.write_bytes(b"\x08" + bytes(30))
    elif damage == "nothing":
        path.unlink()
    else:
        index = {"weight_map": {"0.weight": "model.safetensors", "3.weight": "model-9.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    models = [small() for _ in range(2)]

    def program(rank):
        with pytest.raises(CheckpointError, match=message):
            wb.checkpoint.load_safetensors(wb.parallelize(models[rank], "*: data"), tmp_path)

    run_ranks(program, 2)


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    save_file(small("cpu").state_dict(), tmp_path / "model.safetensors")
    models = [small() for _ in range(2)]

    def program(rank):
        with pytest.raises(CheckpointError, match="failed on ranks" if rank else "holds 0"):
            wb.checkpoint.load_safetensors(
                wb.parallelize(models[rank], "*: data"), tmp_path if rank else tmp_path / "none"
            )

    run_ranks(program, 2)


class Scaled(nn.Module):
    """A parameter of its own, and a buffer that its constructor computes."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4).cumsum(0), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale * self.mask


def fill(module):
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(2.0)


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3"])
def test_tensors_that_nothing_fills_are_listed_and_filled_by_another_call(strategy):
    with torch.device("meta"):
        models = [Scaled() for _ in range(2)]

    def program(rank):
        for _ in range(2):
            with pytest.raises(StrategyError, match=r"2 of 4 tensors on meta got no value: scale, mask.*Call it again"):
                wb.parallelize(models[rank], strategy)
        return whole(wb.parallelize(models[rank], "*: model", init=fill)(torch.ones(3, 4)))

    assert all(torch.equal(output, torch.full((3, 4), 40.0)) for output in run_ranks(program, 2))


def test_layers_that_have_values_keep_them():
    """Such as a pretrained table in front of a new model."""

    def made():
        model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, device="meta"))
        nn.init.constant_(model[0].weight, 7.0)
        model[1].running_mean.fill_(3.0)
        return model

    models = [made() for _ in range(2)]

    def program(rank):
        return logical(wb.parallelize(models[rank], "*: data"))

    for state in run_ranks(program, 2):
        assert state["0.weight"].eq(7).all() and state["1.running_mean"].eq(3).all()
        assert state["2.weight"].abs().max() <= 0.5


def test_a_second_call_takes_the_right_files(tmp_path):
    expected = small("cpu").state_dict()
    save_file(expected, tmp_path / "right.safetensors")
    save_file({"0.weight": torch.ones(8, 6)}, tmp_path / "wrong.safetensors")
    models = [small() for _ in range(2)]

    def program(rank):
        with pytest.raises(CheckpointError, match="missing in the file"):
            wb.parallelize(models[rank], "*: data", init=tmp_path / "wrong.safetensors")
        return logical(wb.parallelize(models[rank], "*: model", init=tmp_path / "right.safetensors"))

    for state in run_ranks(program, 2):
        assert_same(state, expected)


def test_a_function_fills_what_modules_do_not():
    with torch.device("meta"):
        models = [Scaled() for _ in range(2)]

    def program(rank):
        return whole(wb.parallelize(models[rank], "*: model", init=fill)(torch.ones(3, 4)))

    assert all(torch.equal(output, torch.full((3, 4), 40.0)) for output in run_ranks(program, 2))


def test_a_model_from_meta_trains():
    models = [small() for _ in range(2)]
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch), torch.ones(5, 7))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for losses in run_ranks(program, 2):
        assert losses[2] < losses[0]
