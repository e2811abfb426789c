"""The bar that stays in sight at the top of the panel: its tabs, and the button that opens the legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from workbench.ui.assets import asset, element

TABS = {"strategy": "Strategy", "live": "Live", "compare": "Compare"}


TERMS = {
    "params": "Number of parameters. Shared ones count at the first of their layers; one with no others says (shared).",
    "data": "Every rank holds the whole weight and works on its own part of the batch. Gradients are summed.",
    "model": "Each rank holds a part of the weight and computes a part of the result, for the same samples.",
    "expert": "Each rank holds some of the experts whole. Tokens go to the experts that they chose, and come back.",
    "stage": "A part of the model that lies on ranks of its own. A stage passes its activations on to the next.",
    "micro-batches": "Parts that the batch is cut into. With several of them the stages of a pipeline work at the same "
    "time; with one they wait for each other.",
    "schedule": "In which order a stage works on its micro-batches.",
    "sbp": "How a tensor lies on its ranks, one entry for each axis of ranks: split, broadcast or partial sum.",
    "S(0), S(1)": "Split: each rank holds a slice. The number is the dim that is cut, counted from 0; "
    "dim 0 of an activation is the batch.",
    "B": "Broadcast: each rank holds the same, complete tensor.",
    "P": "Partial sum: each rank holds a term of the same shape. The tensor is their sum.",
    "boxing": "The exchange that brings a tensor from one layout into another, where the next layer needs it. The "
    "violet badges show where, by which collective, and how many bytes.",
    "ZeRO": "What is cut over data-parallel ranks to save memory: 1 optimizer state, 2 gradients too, 3 weights too.",
    "shards": "Over how many data ranks ZeRO cuts; 0: over all. Groups of so many ranks, such as those of a host, hold "
    "copies of one another.",
    "context": "How many data ranks take the same samples, each a slice of their sequence, through whole blocks. In "
    "attention, keys and values go round, or each rank takes some heads, whichever sends less.",
    "recompute": "Blocks run forward a second time during backward instead of keeping their activations. cheap keeps "
    "results of products and attention, attention those of products with weights; the text takes a number of blocks.",
    "offload": "What lies in the host's memory, or for CPUs in files on a disk, and comes to the device where it is "
    "needed: the optimizer's state for each update, activations for backward.",
    "sequence": "Between layers that are split by model, activations are split along the sequence (dim 1) "
    "instead of being copied. Norms then take less memory.",
    "overlap": "In how many pieces a layer that is split by rows computes. The sum over ranks of one piece runs beside "
    "the product of the next; 1 sums the whole result afterwards. Over shared memory and CUDA IPC it changes nothing.",
    "precision": "fp32, or autocast to 16 bits; fp8 is bf16 with products of linear layers in 8 bits.",
    "links": "How many bytes per second two ranks exchange, inside a host and between hosts. Latencies have no slider.",
    "memory": "How many bytes a rank may hold.",
    "products": "How many operations per second a rank does in matrix products (flop/s). The bandwidth of its memory "
    "has no slider.",
    "(shared), (gloo)": "How engines exchange tensors: through memory that the processes of one host share, or over "
    "sockets; (ipc): through memory of the GPUs, (nccl): by NCCL, (mixed): shared inside a host, gloo between hosts.",
    "equal to 1 device": "The largest difference of a loss to the run on one device, from the same weights and on the "
    "same batches. The row of that device itself is the reference.",
    "bubble": "The part of a step in which stages of a pipeline have nothing to do.",
    "boxed": "Bytes that all ranks together send in a step. 'About' is an estimate, until a count on metadata replaces "
    "it; 'beside the rows' are activations that skip rows, or exchanges inside a forward, which no badge shows.",
    "other": "Memory at the peak that is neither parameters nor gradients, optimizer state, activations or buffers of "
    "boxings: temporaries, what the allocator keeps for later, libraries.",
    "peak": "The largest memory of a rank's process above what it needed before the model was there, without pages of "
    "files, such as libraries.",
}
"""By word, in the order in which a reader meets them. Fields of these names have them as tips."""


def legend_html() -> str:
    """All words as an HTML list of definitions."""
    pairs = (element("dt", text=word) + element("dd", text=meaning) for word, meaning in TERMS.items())
    return element("dl", *pairs)


class Tabs(anywidget.AnyWidget):
    """Chooses which part of the panel is shown. The page changes it at once, also while the kernel is busy.

    Parts are widgets in the same panel with the class ``wb-tab`` and that of their tab, such as ``wb-on-live``. A click
    on Run shows the live part, with the word "starting", until ``num_answers`` changes.

    Args:
        on_visible: gets whether a page shows the bar.
        on_view: gets the name of each view of it in a page, at least once.

    Attributes:
        chosen: the tab that is shown, also in a page that opens later.
        names: the text of each tab.
    """

    _esm = asset("controls.js") + asset("tabs.js")
    _css = asset("tabs.css")

    chosen = traitlets.Enum(list(TABS), "strategy").tag(sync=True)
    names = traitlets.Dict(TABS).tag(sync=True)
    num_answers = traitlets.Int(0).tag(sync=True)
    legend = traitlets.Unicode(legend_html()).tag(sync=True)

    def __init__(
        self,
        on_visible: Callable[[bool], None] = lambda seen: None,
        on_view: Callable[[str], None] = lambda view: None,
        **traits: Any,
    ) -> None:
        super().__init__(**traits)
        self._on_visible, self._on_view = on_visible, on_view
        self._seen_in: set[str] = set()
        self.on_msg(self._receive)

    def show_counts(self, num_runs: int) -> None:
        """Show on the tab the number of runs to compare."""
        self.names = TABS | ({"compare": f"{TABS['compare']} ({num_runs})"} if num_runs else {})

    def _receive(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("event") == "visible":
            view = str(content.get("view", ""))
            (self._seen_in.add if content["value"] else self._seen_in.discard)(view)
            self._on_view(view)
            self._on_visible(bool(self._seen_in))


def tab_contents(tab: str, children: Sequence[widgets.Widget]) -> widgets.VBox:
    """The contents of a tab."""
    made = widgets.VBox(children)
    for name in ("wb-tab", f"wb-on-{tab}"):
        made.add_class(name)
    return made
