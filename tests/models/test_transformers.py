"""Models of ``transformers``, their code as it is, spread over ranks: the numbers of one device, step by step."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

import workbench as wb
from tests.models.spread import MODES, ranks_of, spread
from tests.models.training import Setup, assert_close, assert_records_agree, on_one_device, on_ranks, whole
from tests.models.zoo import NAMES, cache_argument
from workbench.testing import run_ranks

one_device = functools.cache(on_one_device)

STRATEGIES = [("*: data", 3), ("*: model", 2), ("*: model | 1x2x2", 4), ("*: data | 1x2x1 zero=3", 2)]
BY_NAME = {
    "gpt2": "*: model; transformer.wte: model:row; transformer.wpe: model:row",
    "llama": "*: model; model.embed_tokens: model:row; lm_head: model:column",
}
"""Megatron's way: the words of the tables, then columns and rows in turn; norms on every rank."""


def assert_equals_one_device(setup, way, num_ranks=None, rtol=1e-4, may_gather=frozenset()):
    records, fell_back = on_ranks(setup, way, num_ranks)
    truth = one_device(setup)
    for record in records:
        assert_records_agree(record, truth, rtol)
    assert fell_back <= may_gather, f"no rule for {sorted(fell_back - may_gather)}"


@pytest.fixture
def in_64_bits(monkeypatch):
    """Where the models ask for 32 bits (norms, softmax), they get 64: else two summation orders differ by 1e-7."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    one_device.cache_clear()
    yield
    one_device.cache_clear()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("mode", "attention", "optimizer", "padded"),
    [("weights-2", "sdpa", "sgd", True), ("both-2x2", "eager", "adamw", False)],
)
@pytest.mark.parametrize("name", NAMES)
def test_training_equals_one_device(name, mode, attention, optimizer, padded):
    setup = Setup(name, attention, optimizer, padded=padded and name != "vit")
    assert_equals_one_device(setup, mode)


# The batch is split in test_training_equals_one_device, too; here in uneven parts, of two inputs and of routed tokens.
@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_training_on_uneven_parts_of_the_batch_equals_one_device(name):
    assert_equals_one_device(Setup(name, "eager", "adamw"), "batch-3")


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_equals_one_device(name, mode, attention, optimizer, padded):
    assert_equals_one_device(Setup(name, attention, optimizer, padded=padded and name != "vit"), mode)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mode"), [("bert", "both-2x2"), ("llama", "weights-3")])
def test_in_64_bits(in_64_bits, name, mode):
    setup = Setup(name, "sdpa", "adamw", torch.float64, experts="batched_mm")  # grouped_mm knows no 64 bits
    assert_equals_one_device(setup, mode, rtol=1e-9, may_gather={"repeat_interleave"})


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_in_64_bits(in_64_bits, name, mode):
    setup = Setup(name, "sdpa", "adamw", torch.float64, experts="batched_mm")  # grouped_mm knows no 64 bits
    assert_equals_one_device(setup, mode, rtol=1e-9, may_gather={"repeat_interleave"})


@pytest.mark.parametrize(
    ("experts", "may_gather"),
    [("eager", {"nonzero", "where"}), ("batched_mm", {"repeat_interleave"})],  # which rows go where depends on data
)
@pytest.mark.parametrize("mode", ["batch-2", pytest.param("both-2x2", marks=pytest.mark.slow)])
def test_mixture_of_experts(experts, may_gather, mode):
    assert_equals_one_device(Setup("mixtral", experts=experts), mode, may_gather=may_gather)


@pytest.mark.parametrize(
    ("experts", "strategy", "num_ranks"),
    [
        pytest.param("eager", "*: model", 2, marks=pytest.mark.slow),
        ("grouped_mm", "*: expert", 2),
        pytest.param("eager", "*: expert", 2, marks=pytest.mark.slow),
        pytest.param("batched_mm", "*: model; *: expert:4 | 1x2x2", 4, marks=pytest.mark.slow),
    ],
)
def test_experts_split_over_ranks(experts, strategy, num_ranks):
    """Without gathering, however transformers computes them."""
    setup = Setup("mixtral", experts=experts)
    may_gather = {"repeat_interleave"} if experts == "batched_mm" else frozenset()
    assert_equals_one_device(setup, strategy, num_ranks, may_gather=may_gather)


@pytest.mark.parametrize(
    ("name", "degrees", "num_ranks"),
    [
        pytest.param("gpt2", "1x2x2", 4, marks=pytest.mark.slow),
        ("llama", "1x1x3", 3),
        pytest.param("gpt2", "1x1x3", 3, marks=pytest.mark.slow),
        pytest.param("llama", "1x2x2", 4, marks=pytest.mark.slow),
    ],
)
def test_weights_split_by_name(name, degrees, num_ranks):
    assert_equals_one_device(Setup(name, "sdpa", "adamw"), f"{BY_NAME[name]} | {degrees}", num_ranks)


def test_transposed_layers_and_tables_are_split_where_their_words_say():
    models = [Setup("gpt2").build() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], f"{BY_NAME['gpt2']} | 1x1x2").transformer
        layers = {"wte": model.wte, "c_attn": model.h[0].attn.c_attn, "c_proj": model.h[0].attn.c_proj}
        return {f"{n}.{k}": str(p.sbp[0]) for n, layer in layers.items() for k, p in layer.named_parameters()}

    split = {"wte.weight": "S(0)", "c_attn.weight": "S(1)", "c_attn.bias": "S(0)", "c_proj.weight": "S(0)"}
    assert run_ranks(program, 2) == [{**split, "c_proj.bias": "B"}] * 2


@pytest.mark.parametrize("name", BY_NAME)
def test_weights_split_by_name_move_one_sum_per_pair_of_layers(name):
    setup = Setup(name, "sdpa")
    models, batch = [setup.build() for _ in range(2)], setup.batch()

    def program(rank):
        model = wb.parallelize(models[rank], f"{BY_NAME[name]} | 1x1x2")
        with wb.debug.trace() as trace:
            model(**batch)
        return Counter((r.change, r.function.rpartition(".")[2]) for r in trace.records if r.wire_bytes)

    tables = {"gpt2": ["wte", "wpe"], "llama": ["embed_tokens"]}[name]
    rows = {"gpt2": ["c_proj", "c_proj"], "llama": ["o_proj", "down_proj"]}[name]
    expected = Counter([("P -> B", layer) for layer in tables + 2 * rows])
    expected += Counter([("P -> B", "cross_entropy"), ("P(max) -> B", "cross_entropy")])  # the words stay split
    for found in run_ranks(program, 2):
        if name == "gpt2":  # queries, keys and values lie side by side in one weight: halves of it are not heads
            found = Counter({key: n for key, n in found.items() if key[1] != "split"})
        assert found == expected


@pytest.mark.parametrize(
    ("name", "strategy", "num_ranks"),
    [("t5", "*: data", 2), pytest.param("mixtral", "*: model", 2, marks=pytest.mark.slow)],
)
def test_strategies_that_know_no_names(name, strategy, num_ranks):
    assert_equals_one_device(Setup(name), strategy, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy(name, attention, strategy, num_ranks):
    assert_equals_one_device(Setup(name, attention), strategy, num_ranks)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_layers_on_two_stages(name):
    last = {"gpt2": "transformer.h.1", "llama": "model.layers.1"}[name]
    assert_equals_one_device(Setup(name), f"*: model; {last}: model@1 | 2x1x2", 4)


def assert_layouts_agree(setup, modes):
    (alone, *_), _ = on_ranks(setup, "*: data", 1)
    for mode in modes:
        records, _ = on_ranks(setup, mode)
        assert_records_agree(records[-1], alone, 1e-4)
    assert not torch.equal(alone.logits, one_device(replace(setup, dropout=0.0)).logits), "nothing was dropped"


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize(("name", "attention", "mode"), [("gpt2", "eager", "both-2x2"), ("bert", "sdpa", "batch-3")])
def test_dropout_drops_the_same_in_every_layout(name, attention, mode):
    assert_layouts_agree(Setup(name, attention, dropout=0.2), [mode])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_in_every_way(name, attention):
    assert_layouts_agree(Setup(name, attention, dropout=0.2), MODES)


@pytest.mark.parametrize(
    ("name", "way", "num_ranks"),
    [
        pytest.param("gpt2", "*: model", 2, marks=pytest.mark.slow),
        pytest.param("llama", "*: data | 1x2x1 zero=3", 2, marks=pytest.mark.slow),
        ("t5", "*: data", 2),
    ],
)
def test_gradient_checkpointing(name, way, num_ranks):
    assert_equals_one_device(Setup(name, recomputes=True), way, num_ranks)


@pytest.mark.parametrize(
    ("name", "mode"), [("mixtral", "both-2x2"), pytest.param("llama", "weights-3", marks=pytest.mark.slow)]
)
def test_autocast(name, mode):
    """bfloat16 has 8 bits: one device is as far from its own 32 bits."""
    assert_equals_one_device(Setup(name, autocasts=True), mode, rtol=3e-2)


@pytest.mark.parametrize("part", ["logits", "grads", "weights"])
def test_the_comparison_notices_a_wrong_number(part):
    truth = one_device(Setup("gpt2"))
    wrong = replace(truth, grads=dict(truth.grads), weights=dict(truth.weights))
    if part == "logits":
        wrong.logits = truth.logits * 1.001
    else:
        tensors = getattr(wrong, part)
        tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"] * 1.001
    with pytest.raises(AssertionError, match="differs by"):
        assert_records_agree(wrong, truth, 1e-4)


@pytest.mark.parametrize(
    ("name", "mode"), [pytest.param("llama", "both-2x2", marks=pytest.mark.slow), ("t5", "batch-2")]
)
def test_a_cache_of_keys_is_continued(name, mode):
    setup = Setup(name, "sdpa", padded=True)
    models, batch = [setup.build().eval() for _ in range(ranks_of(mode))], setup.batch()
    labels = batch.pop("labels")
    words, key = (labels.clamp(min=0), "decoder_input_ids") if name == "t5" else (batch.pop("input_ids"), "input_ids")

    def last_logits(model, batch, first, second):
        start = model(**batch, **{key: first}, use_cache=True)
        return model(**batch, **{key: second}, **cache_argument(model, start.past_key_values), return_dict=False)[0]

    if name != "t5":
        batch.pop("attention_mask")
    expected = last_logits(setup.build().eval(), batch, words[:, :4], words[:, 4:])

    def program(rank):
        model, inputs = spread(models[rank], {**batch, "first": words[:, :4], "second": words[:, 4:]}, mode)
        first, second = inputs.pop("first"), inputs.pop("second")
        return whole(last_logits(model, inputs, first, second))

    for logits in run_ranks(program, len(models)):
        assert_close(logits, expected.detach(), 1e-4, 0.0, "logits")


@pytest.mark.parametrize(
    ("name", "mode"), [pytest.param("gpt2", "batch-2", marks=pytest.mark.slow), ("t5", "weights-2")]
)
def test_generated_words_are_those_of_one_device(name, mode):
    setup = Setup(name, "sdpa")
    models, batch = [setup.build().eval() for _ in range(ranks_of(mode))], {"input_ids": setup.batch()["input_ids"]}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = setup.build().eval().generate(**batch, **options)

    def program(rank):
        model, inputs = spread(models[rank], batch, mode)
        return whole(model.generate(**inputs, **options))

    for words in run_ranks(program, len(models)):
        assert torch.equal(words, expected)


@pytest.mark.parametrize(("name", "mode"), [("bert", "weights-2"), ("vit", "batch-2")])
def test_everything_a_model_can_return(name, mode):
    setup = Setup(name)
    models, batch = [setup.build() for _ in range(ranks_of(mode))], setup.batch()
    constraints = {"output_hidden_states": True, "output_attentions": True}
    expected = setup.build()(**batch, **constraints)

    def program(rank):
        model, inputs = spread(models[rank], batch, mode)
        output = model(**inputs, **constraints)
        assert type(output) is type(expected) and output.keys() == expected.keys()
        return [whole(tensor) for tensor in (*output.hidden_states, *output.attentions)]

    for found in run_ranks(program, len(models)):
        for tensor, truth in zip(found, (*expected.hidden_states, *expected.attentions), strict=True):
            assert_close(tensor, truth.detach(), 1e-4, 0.0, "a hidden state or attention")
