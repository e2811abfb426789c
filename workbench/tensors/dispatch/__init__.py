"""Runs torch's functions on global tensors: finds a rule, boxes the inputs, runs torch on the shards, wraps the result.

`registry` keeps the rules, `planning` picks layouts, `dispatcher` runs a plan, `fallback` gathers what has no rule.
"""

from workbench.tensors.dispatch import autograd, dispatcher, hooks, read_values

__all__ = ["autograd", "dispatcher", "hooks", "read_values"]
