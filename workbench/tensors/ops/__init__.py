"""Runs torch's functions on global tensors: finds a rule, boxes the inputs, runs torch on the shards, wraps the result.

`registry` keeps the rules, `planning` picks layouts, `dispatch` runs a plan, `fallback` gathers what has no rule.
"""

from workbench.tensors.ops import autograd, dispatch, hooks, reading

__all__ = ["autograd", "dispatch", "hooks", "reading"]
