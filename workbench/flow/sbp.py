"""``flow.sbp``: the layout of a tensor on one axis of a placement: ``split(dim=0)``, ``broadcast``, ``partial_sum``."""

from workbench.core.sbp import broadcast, parse, partial_max, partial_min, partial_sum, split

__all__ = ["broadcast", "parse", "partial_max", "partial_min", "partial_sum", "split"]
