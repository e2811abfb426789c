"""What a verdict says where losses are no numbers, and where fewer steps were compared than were to be.

A verdict compares differences, and two losses that are both nan do not differ. Steps after the compared ones have no
loss of one device at all. A tick must hide neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.core.verdict import Verdict


def first_not_finite(losses: Sequence[float]) -> int | None:
    """The first step, from 0, whose loss is nan or infinite; None if all are numbers.

    >>> first_not_finite([0.5, math.inf, math.nan]), first_not_finite([0.5])
    (1, None)
    """
    return next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)


@dataclass(frozen=True, slots=True)
class LossPair:
    """The losses of a run and of one device, of which the first ``wanted`` steps are to be compared.

    >>> pair = LossPair([0.5, 0.25, math.nan], [0.5, 0.25], 2)
    >>> pair.described(Verdict(True, text="equal")).text
    'equal; the loss is nan from step 3 on, after the compared steps'
    """

    own: Sequence[float]
    one_device: Sequence[float]
    wanted: int

    @property
    def num_common(self) -> int:
        """Number of steps that both have, of those that are to be compared."""
        return min(len(self.own), len(self.one_device), self.wanted)

    @property
    def broken_at(self) -> int | None:
        """The first step of these at which a loss is no number; None if there is none."""
        n = self.num_common
        found = first_not_finite(self.own[:n]), first_not_finite(self.one_device[:n])
        return min((step for step in found if step is not None), default=None)

    @property
    def is_unlike(self) -> bool:
        """Whether at that step the loss of the other is a number: no rounding explains that."""
        step = self.broken_at
        return step is not None and math.isfinite(self.own[step]) != math.isfinite(self.one_device[step])

    @property
    def num_compared(self) -> int:
        """Number of steps that a verdict compares: those before both losses are no numbers."""
        return self.num_common if self.broken_at is None or self.is_unlike else self.broken_at

    def described(self, verdict: Verdict) -> Verdict:
        """The verdict with what these losses say, in its ``text`` and as ``note`` beside the mark."""
        step = self.broken_at
        if step is not None and self.is_unlike:
            mine, other = self.own[step], self.one_device[step]
            text = f"the loss of step {step + 1} is {mine:.3g}, on one device {other:.3g}"
            note = f"1 device {other}" if math.isfinite(mine) else str(mine)
            return replace(verdict, equal=False, grown=False, text=text, note=note)
        if step is not None:
            equal = verdict.equal if step else None
            text = f"the loss is {self.own[step]} from step {step + 1} on, on one device too"
            return replace(verdict, equal=equal).with_note(f"both {self.own[step]}", text)
        if verdict.equal is not None and self.num_common < self.wanted:
            steps = f"{self.num_common} step{'s' if self.num_common > 1 else ''}"
            verdict = verdict.with_note(
                steps, f"the run was stopped: {self.num_common} of {self.wanted} steps were compared"
            )
        return self._with_later_steps(verdict)

    def _with_later_steps(self, verdict: Verdict) -> Verdict:
        step = first_not_finite(self.own)
        if step is None:
            return verdict
        text = f"the loss is {self.own[step]} from step {step + 1} on"
        if not self.num_common:
            return verdict.with_note(str(self.own[step]), text)
        return verdict.with_note(f"then {self.own[step]}", f"{text}, after the compared steps")
