"""The boxings of one run of a dry run, and the bytes that ranks send in them."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any

import torch

from workbench.core.rank_numbers import sent_by_number
from workbench.tensors.world import World

Kinds = dict[str, int]
"""Bytes by kind of exchange."""


class BoxingCollector:
    """Replaces ``wb.debug.trace()`` and receives every boxing, also those without this rank."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int, str], tuple[Any, Any, int]] = {}
        self._stage: Any = None

    def of_stage(self, world: World) -> BoxingCollector:
        """The same collector, for boxings of one of this rank's stages."""
        made = copy(self)
        made._stage = world
        return made

    def site(self, function: str = "") -> None:
        """No place: a dry run does not say where a boxing comes from."""

    def add(self, site: Any, direction: str, plan: Any, dtype: torch.dtype) -> None:
        """Count a boxing plan, a boxing path or moved rows."""
        for step in getattr(plan, "steps", (plan,)):
            key = id(step), id(self._stage), direction  # holding both keeps their ids from being used again
            self._plans[key] = step, self._stage, self._plans.get(key, (step, self._stage, 0))[2] + 1

    def add_reduction(self, *args: Any, **kwargs: Any) -> None:
        """Count nothing: this rank's traffic has the sums."""

    @property
    def sent(self) -> dict[int, Kinds]:
        """By rank."""
        found: dict[int, Kinds] = {}
        for plan, stage, times in self._plans.values():
            for rank, size in sent_by_number(plan, stage and stage.rank_of).items():
                if stage is not None:
                    if not stage.transport.is_of_this_stage(rank):
                        continue  # its own stage's run of the program counts it
                    rank = stage.rank_of[rank]
                kinds = found.setdefault(rank, {})
                kinds[plan.kind] = kinds.get(plan.kind, 0) + times * size
        return found

    @cached_property
    def in_forward(self) -> dict[int, Kinds]:
        """By rank, what it sends and receives in forward. A rank with one stage passes these boxings of all stages."""
        found: dict[int, Kinds] = {}
        for (_, _, direction), (plan, _, times) in self._plans.items():
            for what in ("bytes_sent", "bytes_received") if direction == "forward" else ():
                for rank, size in getattr(plan, what, {}).items():
                    kinds = found.setdefault(rank, {})
                    kinds[f"{plan.kind} {what}"] = kinds.get(f"{plan.kind} {what}", 0) + times * size
        return found
