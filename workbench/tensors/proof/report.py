"""What a proof has found: signatures that give wrong numbers, and right ones that no rule declares."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.core.sbp import Sbp


@dataclass(frozen=True)
class Finding:
    """One signature of one call, on one axis.

    Attributes:
        call: the function and its arguments in words, e.g. ``"sum(float32 (5, 4), 0)"``.
        function: the folded name.
        inputs, outputs: layouts of the operands and of the results.
        num_ranks: size of the axis on which it showed.
        problem: for a wrong one, what the ranks give and what one device gives.
    """

    call: str
    function: str
    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    num_ranks: int
    problem: str = ""

    @property
    def signature(self) -> str:
        """``"S(0), B -> S(0)"``."""
        return f"{', '.join(map(repr, self.inputs))} -> {', '.join(map(repr, self.outputs))}"

    def __str__(self) -> str:
        text = f"{self.call} as {self.signature} on {self.num_ranks} ranks"
        return f"{text}: {self.problem}" if self.problem else text


@dataclass
class Proof:
    """The result of ``wb.debug.prove``. ``print`` it; ``bool(proof)`` is whether no signature is wrong.

    Attributes:
        wrong: declared signatures whose results or gradients differ from one device's.
        missing: right signatures that are not declared, where the rule's plan moves bytes and this one would not.
        num_calls: number of different calls of functions.
        num_checked: number of declared signatures that were checked, each with its gradients.
        skipped: calls that could not be checked, with the reason.
    """

    wrong: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    num_calls: int = 0
    num_checked: int = 0
    skipped: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.wrong

    def __add__(self, other: Proof) -> Proof:
        return Proof(
            self.wrong + other.wrong,
            self.missing + other.missing,
            self.num_calls + other.num_calls,
            self.num_checked + other.num_checked,
            self.skipped + other.skipped,
        )

    def __str__(self) -> str:
        summary = f"{self.num_checked} signatures of {self.num_calls} calls: {len(self.wrong)} wrong"
        lines = [f"{summary}, {len(self.missing)} missing"]
        lines += [f"  wrong    {finding}" for finding in self.wrong]
        lines += [f"  missing  {finding}" for finding in self.missing]
        lines += [f"  skipped  {text}" for text in self.skipped]
        return "\n".join(lines)
