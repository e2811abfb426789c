"""The bytes of an exchange that has no boxing plan, with the attributes of one: for traces."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.layout import Layout, Shape


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes that ranks send. Where they depend on values, ``bytes_sent`` has those of this rank only."""

    source: Layout
    destination: Layout
    shape: Shape
    bytes_sent: dict[int, int]
    kind: str = "rows"

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire, summed over the ranks of ``bytes_sent``."""
        return sum(self.bytes_sent.values())
