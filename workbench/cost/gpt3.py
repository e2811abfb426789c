"""GPT-3 of 175 billion parameters, and its training: 64 stages, each on 6 hosts of 8 GPUs.

The eight GPUs of a host split the layers (model parallelism), and the six hosts of a stage split the batch (data
parallelism): 64 x 6 x 8 = 3072 GPUs.
"""

from __future__ import annotations

from workbench.core.strategy import ResolvedStrategy
from workbench.cost.transformer import Transformer, transformer_strategy
from workbench.errors import StrategyError

GPT3 = Transformer(hidden=12288, heads=96, layers=96, vocab=51200, seq=2048)
"""Brown et al., arXiv 2005.14165, with the vocabulary padded to a multiple of 1024 as in Megatron-LM."""
DEGREES = (64, 6, 8)
"""Pipeline x data x model."""
BATCH_SIZE = 1536
"""Texts of 2048 words: 3.1 million words in a step."""


def gpt3_strategy(
    gpus: int = 3072,
    batch_size: int = BATCH_SIZE,
    *,
    model: Transformer = GPT3,
    pipeline: int = DEGREES[0],
    tensor: int = DEGREES[2],
    recompute: bool = True,
) -> ResolvedStrategy:
    """The strategy of the example. Another number of GPUs changes its data-parallel degree. One text is a micro-batch.

    >>> gpt3_strategy().degrees, gpt3_strategy(1024).degrees
    ((64, 6, 8), (64, 2, 8))

    Raises:
        StrategyError: the GPUs or the batch cannot be divided.
    """
    data, rest = divmod(gpus, pipeline * tensor)
    if rest or not data:
        raise StrategyError(
            f"gpt3_strategy: {gpus} GPUs in {pipeline} stages of {tensor} model-parallel ranks: GPUs must be a "
            f"multiple of {pipeline} x {tensor} = {pipeline * tensor}."
        )
    if batch_size % data:
        raise StrategyError(
            f"gpt3_strategy: batch_size={batch_size} on {data} data-parallel replicas: the batch must be a multiple."
        )
    return transformer_strategy(
        model,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        num_micro_batches=batch_size // data,
        recompute=recompute,
        precision="fp16",
    )
