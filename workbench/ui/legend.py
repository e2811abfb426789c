"""Definitions of the panel's words, shown by its "?" button and as tips at the words."""

from __future__ import annotations

from workbench.ui.assets import element

TERMS = {
    "data": "Every rank holds the whole weight and works on its own part of the batch. Gradients are summed.",
    "model": "Each rank holds a part of the weight and computes a part of the result, for the same samples.",
    "stage": "A part of the model that lies on ranks of its own. A stage passes its activations on to the next.",
    "micro-batch": "A part of the batch. With several of them the stages of a pipeline work at the same time; with one "
    "they wait for each other.",
    "sbp": "How a tensor lies on its ranks, one entry for each axis of ranks: split, broadcast or partial sum.",
    "S(0), S(1)": "Split: each rank holds a slice. The number is the dimension that is cut, counted from 0; "
    "dimension 0 of an activation is the batch.",
    "B": "Broadcast: each rank holds the same, complete tensor.",
    "P": "Partial sum: each rank holds a summand of the same shape. The tensor is the sum of them.",
    "boxing": "The exchange that brings a tensor from one layout into another, where the next layer needs it. The "
    "violet badges show where, by which collective, and how many bytes.",
    "ZeRO": "What is cut over data-parallel ranks to save memory: 1 optimizer state, 2 gradients too, 3 weights too.",
    "recompute": "Blocks run forward a second time during backward instead of keeping their activations.",
    "sequence": "Between layers that are split by model, activations are split along the sequence (dimension 1) "
    "instead of being copied. Norms then take less memory.",
    "links": "How many bytes per second two ranks exchange, inside a host and between hosts.",
    "products": "How many operations per second a rank does in matrix products (flop/s).",
    "(shared), (gloo)": "How engines exchange tensors: through memory that the processes of one host share, or over "
    "sockets.",
    "equal to 1 device": "The largest difference of a loss to the run on one device, from the same weights and on the "
    "same batches. The row of that device itself is the reference.",
    "bubble": "The part of a step in which stages of a pipeline have nothing to do.",
    "boxed": "Bytes that all ranks together send in a step. 'About' is an estimate, until a count on metadata replaces "
    "it; 'beside the rows' are activations that skip rows, or exchanges inside a forward, which no badge shows.",
    "other": "Memory at the peak that is neither parameters nor gradients, optimizer state, activations or buffers of "
    "boxings: temporaries, what the allocator keeps for later, libraries.",
    "peak": "The largest memory of a rank's process above what it needed before the model was there.",
}
"""By word, in the order in which a reader meets them."""


def legend_html() -> str:
    """All words as an HTML list of definitions."""
    pairs = (element("dt", text=word) + element("dd", text=meaning) for word, meaning in TERMS.items())
    return element("dl", *pairs)
