"""What a program does, and where it goes wrong: traces, profiles, memory, the first value that is not finite, rules.

``with wb.debug.trace() as trace: step()`` collects the boxings of a step; ``print(trace)`` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.lazy import lazy_names

if TYPE_CHECKING:
    from workbench.api import boxing_plan as boxing_plan
    from workbench.tensors.agreement import check_agreement as check_agreement
    from workbench.tensors.boxing.explicit import explicit_boxing as explicit_boxing
    from workbench.tensors.proof import prove as prove
    from workbench.training.diagnostics.boxing_trace import trace as trace
    from workbench.training.diagnostics.memory_report import memory_report as memory_report
    from workbench.training.diagnostics.nonfinite import find_nonfinite as find_nonfinite
    from workbench.training.pipelining.timeline import timeline as timeline
    from workbench.training.profiling.merging import profile as profile
    from workbench.training.runs.first_difference import first_difference as first_difference

_HOMES = {
    "workbench.tensors.agreement": ["check_agreement"],
    "workbench.api": ["boxing_plan"],
    "workbench.tensors.boxing.explicit": ["explicit_boxing"],
    "workbench.tensors.proof": ["prove"],
    "workbench.training.pipelining.timeline": ["timeline"],
    "workbench.training.runs.first_difference": ["first_difference"],
    "workbench.training.profiling.merging": ["profile"],
    "workbench.training.diagnostics.nonfinite": ["find_nonfinite"],
    "workbench.training.diagnostics.memory_report": ["memory_report"],
    "workbench.training.diagnostics.boxing_trace": ["trace"],
}

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
