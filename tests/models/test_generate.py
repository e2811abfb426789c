"""``model.generate()`` on spread models: the tokens of one device, greedy, sampled and by beams, with any cache.

Random numbers belong to logical positions, so a sampled text is compared with one rank alone under the same seed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.models import zoo
from workbench.testing import run_ranks

NAMES = ("gpt2", "llama", "qwen2", "gemma", "t5", "bart", "mixtral")
STRATEGIES = {"*: data": 3, "*: model": 2, "*: model | 1x2x2": 4}  # 3 ranks share 4 samples unevenly
SEED, NUM_WORDS, NUM_NEW = 7, 5, 4

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9}
MODES: dict[str, dict[str, Any]] = {
    "greedy without cache": {**GREEDY, "use_cache": False},
    "greedy with a static cache": {**GREEDY, "cache_implementation": "static"},
    "greedy with penalties": {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "greedy, prompt in chunks": {**GREEDY, "prefill_chunk_size": 2},
    "sampled without cache": {**SAMPLED, "use_cache": False},
    "sampled with a static cache": {**SAMPLED, "cache_implementation": "static"},
    "sampled, several per prompt": {**SAMPLED, "num_return_sequences": 2},
    "sampled by small probabilities": {"do_sample": True, "typical_p": 0.8, "min_p": 0.02, "eta_cutoff": 0.01},
    "beams": {**GREEDY, "num_beams": 3},
    "beams without cache": {**GREEDY, "num_beams": 2, "use_cache": False},
    "beams with a static cache": {**GREEDY, "num_beams": 2, "cache_implementation": "static"},
    "beams, sampled": {"do_sample": True, "num_beams": 2},
    "beams, several per prompt": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
}


def make_model(name: str) -> nn.Module:
    """A model whose words vary: the weights of the zoo are too small for that."""
    model = zoo.make(name, "sdpa").eval()
    model.config.output_router_logits = False  # transformers cannot generate with a mask and the loss of routers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def prompts() -> dict[str, torch.Tensor]:
    """Four prompts, two of them shorter, with padding on the left."""
    ids = torch.randint(3, zoo.WORDS, (4, NUM_WORDS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[2, :1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: nn.Module, options: dict[str, Any]) -> torch.Tensor:
    """The generated words, plain, with those of the prompt where the model repeats them."""
    found = model.generate(**prompts(), **{"max_new_tokens": NUM_NEW, "pad_token_id": 0, "eos_token_id": 2, **options})
    return found.full_tensor() if isinstance(found, wb.GlobalTensor) else found


def on_ranks(name: str, strategy: str, num_ranks: int, modes: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """By rank: the words of every mode, each from the same seed."""
    models = [make_model(name) for _ in range(num_ranks)]

    def program(rank: int) -> list[torch.Tensor]:
        model = wb.parallelize(models[rank], strategy)
        found = []
        for options in modes:
            wb.manual_seed(SEED)
            found.append(generate(model, options))
        return found

    return run_ranks(program, num_ranks)


def expected_words(name: str, options: dict[str, Any]) -> torch.Tensor:
    return _expected(name, tuple(options.items()))


@functools.cache
def _expected(name: str, options: tuple[tuple[str, Any], ...]) -> torch.Tensor:
    if dict(options)["do_sample"]:
        return on_ranks(name, "*: data", 1, [dict(options)])[0][0]
    return generate(make_model(name), dict(options))


def assert_words_are_those_of_one_device(name: str, strategy: str, num_ranks: int, modes: list[dict[str, Any]]) -> None:
    expected = [expected_words(name, options) for options in modes]
    for found in on_ranks(name, strategy, num_ranks, modes):
        for options, words, truth in zip(modes, found, expected, strict=True):
            assert torch.equal(words, truth), f"{options}: {words.tolist()} instead of {truth.tolist()}"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("strategy", [*list(STRATEGIES)[:2], pytest.param("*: model | 1x2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_and_sampled_words_are_those_of_one_device(name, strategy):
    assert_words_are_those_of_one_device(name, strategy, STRATEGIES[strategy], [GREEDY, SAMPLED])


# Each mode once here; all of every model below.
@pytest.mark.parametrize(
    ("name", "strategy", "start"), [("gpt2", "*: data", 0), pytest.param("t5", "*: model", 1, marks=pytest.mark.slow)]
)
def test_every_mode_gives_the_words_of_one_device(name, strategy, start):
    assert_words_are_those_of_one_device(name, strategy, STRATEGIES[strategy], list(MODES.values())[start::2])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_mode_of_every_model_gives_the_words_of_one_device(name, strategy):
    assert_words_are_those_of_one_device(name, strategy, STRATEGIES[strategy], list(MODES.values()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "num_ranks"), [("pipeline", 2), ("*: data | zero=3", 2)])
def test_stages_and_zero_give_the_words_of_one_device(strategy, num_ranks):
    assert_words_are_those_of_one_device("llama", strategy, num_ranks, [GREEDY, SAMPLED, MODES["beams"]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data", "*: model"])
def test_a_small_model_may_guess_ahead(strategy):
    prompt = prompts()["input_ids"][1:2]
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    models, assistants = ([make_model("gpt2") for _ in range(3)] for _ in range(2))
    expected = models[2].generate(prompt, assistant_model=assistants[2], **options)

    def program(rank):
        model, assistant = wb.parallelize(models[rank], strategy), wb.parallelize(assistants[rank], strategy)
        return model.generate(prompt, assistant_model=assistant, **options).full_tensor()

    for words in run_ranks(program, 2):
        assert torch.equal(words, expected)


def test_words_can_be_streamed():
    prompt = prompts()["input_ids"][1:2]
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    models = [make_model("gpt2") for _ in range(2)]
    expected = make_model("gpt2").generate(prompt, **options)

    class Streamer:
        def __init__(self):
            self.words = []

        def put(self, words):
            self.words += words.flatten().tolist()

        def end(self):
            self.words = torch.tensor([self.words])

    def program(rank):
        streamer = Streamer()
        wb.parallelize(models[rank], "*: model").generate(prompt, streamer=streamer, **options)
        return streamer.words

    for words in run_ranks(program, 2):
        assert torch.equal(words, expected)


def test_the_prompts_tell_modes_apart():
    """Else equal words would say little: they differ by sample, by position, by mode and by seed."""
    greedy, sampled = (expected_words("gpt2", options)[:, NUM_WORDS:] for options in (GREEDY, SAMPLED))
    assert len({tuple(row) for row in greedy.tolist()}) == 4
    assert max(len(set(row)) for row in greedy.tolist()) > 2
    assert not torch.equal(greedy, sampled)
    assert not torch.equal(greedy, expected_words("gpt2", MODES["greedy with penalties"])[:, NUM_WORDS:])
    assert not torch.equal(greedy, expected_words("gpt2", MODES["beams"])[:, NUM_WORDS:])


def test_the_comparison_notices_another_seed(monkeypatch):
    expected_words("gpt2", SAMPLED)
    monkeypatch.setattr("tests.models.test_generate.SEED", SEED + 1)
    with pytest.raises(AssertionError, match="instead of"):
        assert_words_are_those_of_one_device("gpt2", "*: model", 2, [SAMPLED])
