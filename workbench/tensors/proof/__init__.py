"""Brute force on rules: does the local function, run on shards as a rule says, give one device's numbers?

``cut`` cuts tensors into shards and puts results together, ``examples`` collects calls, ``search`` tries the layouts,
``report`` tells what came out. No rank talks to another: all shards are in one thread, so that a wrong rule shows as
wrong numbers and not as a hang.
"""

from workbench.tensors.proof.report import Finding, Proof
from workbench.tensors.proof.search import prove, prove_examples

__all__ = ["Finding", "Proof", "prove", "prove_examples"]
