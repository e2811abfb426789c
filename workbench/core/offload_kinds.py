"""What the option ``offload`` of a strategy says: what lies in the host's memory, or on CPUs in files on a disk."""

from __future__ import annotations

KINDS = ("optimizer", "activations")
"""The optimizer's state; what the forward of a module keeps for its backward."""
CHOICES = ("optimizer", "activations", "optimizer+activations")
"""What the option says, where it is given."""
BUCKET_BYTES = 2**24
"""The state of an optimizer comes and goes with parameters of so many bytes at a time, or with one that is larger."""


def offload_kind(value: object) -> str:
    """The option as a word: some of ``KINDS``, joined by ``+`` in their order, or empty.

    True is all of them, "none" and False are empty. Texts of other words stay as they are.

    >>> offload_kind(False), offload_kind("optimizer"), offload_kind("activations+optimizer")
    ('', 'optimizer', 'optimizer+activations')
    """
    if isinstance(value, bool) or value == "none":
        return "+".join(KINDS) if value is True else ""
    words = str(value).split("+")
    known = [kind for kind in KINDS if kind in words]
    return "+".join(known) if sorted(known) == sorted(words) else str(value)
