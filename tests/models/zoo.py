"""Models of ``transformers`` with their code as it is, tiny and with random weights, and batches for them.

Sizes divide by nothing: 5 samples, 7 tokens, 37 words, and 4 heads that two ranks can share and three cannot.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from typing import Any

import torch
from torch import nn

NAMES = ("gpt2", "llama", "bert", "vit", "t5", "mixtral")
OTHERS = ("qwen2", "gemma", "bart")
BATCH, LENGTH, WORDS, WIDTH = 5, 7, 37, 24
_lock = threading.Lock()


def make(name: str, attention: str = "eager", dropout: float = 0.0, experts: str = "grouped_mm") -> nn.Module:
    """A model in training mode with the weights of seed 0.

    Args:
        name: one of ``NAMES`` or ``OTHERS``.
        attention: how it is computed, ``"eager"`` or ``"sdpa"``.
        dropout: the rate, everywhere.
        experts: how a mixture of experts is computed, ``"eager"``, ``"grouped_mm"`` or ``"batched_mm"``.
    """
    with _lock:  # the default generator is shared by simulated ranks
        return copy.deepcopy(_built(name, attention, dropout, experts))


@functools.cache
def _built(name: str, attention: str, dropout: float, experts: str) -> nn.Module:
    torch.manual_seed(0)
    model_class, config = _config(name, dropout)
    config._attn_implementation = attention
    if name == "mixtral":
        config._experts_implementation = experts
    with torch.device("cpu"):  # kept for other callers, whatever device this one builds on
        model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at zero and norms at one, where mistakes could hide
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def _config(name: str, dropout: float) -> tuple[Any, Any]:
    import transformers as hf

    hf.logging.set_verbosity_error()

    sizes = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    words = {"vocab_size": WORDS, "max_position_embeddings": 16}
    if name == "gpt2":
        rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        sizes_of_gpt = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": 16, "vocab_size": WORDS}
        return hf.GPT2LMHeadModel, hf.GPT2Config(**sizes_of_gpt, **rates, bos_token_id=1, eos_token_id=2)
    if name == "llama":
        config = hf.LlamaConfig(**sizes, **words, num_key_value_heads=2, attention_dropout=dropout)
        return hf.LlamaForCausalLM, config
    if name == "qwen2":
        config = hf.Qwen2Config(**sizes, **words, num_key_value_heads=2, attention_dropout=dropout)
        return hf.Qwen2ForCausalLM, config
    if name == "gemma":
        config = hf.GemmaConfig(**sizes, **words, num_key_value_heads=1, head_dim=6, attention_dropout=dropout)
        return hf.GemmaForCausalLM, config
    if name == "bart":
        config = hf.BartConfig(
            **words, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, dropout=dropout,
            decoder_start_token_id=2,
        )  # fmt: skip
        return hf.BartForConditionalGeneration, config
    if name == "bert":
        return hf.BertForMaskedLM, hf.BertConfig(**sizes, **words, **drop)
    if name == "vit":
        return hf.ViTForImageClassification, hf.ViTConfig(**sizes, **drop, image_size=8, patch_size=4, num_labels=5)
    if name == "t5":
        config = hf.T5Config(
            d_model=WIDTH, d_ff=40, num_layers=2, num_heads=4, d_kv=6, vocab_size=WORDS, dropout_rate=dropout,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration, config
    config = hf.MixtralConfig(
        **sizes, **words, num_key_value_heads=2, num_local_experts=4, attention_dropout=dropout,
        output_router_logits=True,
    )  # fmt: skip
    return hf.MixtralForCausalLM, config


def batch_for(name: str, padded: bool = False, size: int = BATCH) -> dict[str, torch.Tensor]:
    """Keyword arguments of a call with labels; ``padded`` gives the samples different lengths."""
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        pixels = torch.randn(size, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (size,), generator=generator)}
    ids = torch.randint(3, WORDS, (size, LENGTH), generator=generator)
    num_labels = LENGTH - 1 if name == "t5" else LENGTH
    drawn = torch.randint(3, WORDS, (size, num_labels), generator=generator)
    labels = ids.clone() if name in ("gpt2", "llama", "mixtral") else drawn
    labels[0, :2] = -100
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        lengths = torch.tensor([LENGTH - row % 4 for row in range(size)])
        batch["attention_mask"] = (torch.arange(LENGTH) < lengths[:, None]).long()
    return batch


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache of keys and values under the name that the model has for it; ``transformers`` 5.24 has a new one."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}
