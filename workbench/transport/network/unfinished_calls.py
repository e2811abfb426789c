"""What torch's flight recorder knows of NCCL's calls in flight, for the text of an error.

torch records the last calls of every group of NCCL, unless TORCH_FR_BUFFER_SIZE is 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

_NUM_SHOWN = 3


def unfinished_calls() -> str:
    """The calls that NCCL has not ended, oldest first; empty where torch has no NCCL, or has recorded nothing."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # of builds with NCCL
    if dump is None:
        return ""
    try:
        return describe_dump(json.loads(dump(includeCollectives=True, onlyActive=True)))
    except (RuntimeError, TypeError, ValueError, LookupError) as error:  # a text for an error must not be another one
        return f"torch's record of NCCL cannot be read: {error}"


def describe_dump(dump: Mapping[str, Any]) -> str:
    """The same for a dump of the recorder, in the format 2.x.

    >>> entry = dict(profiling_name="nccl:all_reduce", state="scheduled", is_p2p=False, collective_seq_id=5)
    >>> describe_dump({"entries": [entry | dict(process_group=["0", "default_pg"], input_sizes=[[25]])]})
    'NCCL has not ended 1 call: all_reduce of [25], number 5 of group default_pg'
    """
    calls = [_describe(entry, dump) for entry in dump.get("entries", ()) if entry["state"] != "completed"]
    if not calls:
        return ""
    more = f"; and {len(calls) - _NUM_SHOWN} more" if len(calls) > _NUM_SHOWN else ""
    return f"NCCL has not ended {len(calls)} call{'s' * (len(calls) > 1)}: {'; '.join(calls[:_NUM_SHOWN])}{more}"


def _describe(entry: Mapping[str, Any], dump: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    sizes = "".join(f" of {size}" for size in entry["input_sizes"][:1] or entry["output_sizes"][:1])
    ranks = dump.get("pg_config", {}).get(name, {}).get("ranks", "")
    function = entry["profiling_name"].removeprefix("nccl:")
    group = " ".join(filter(None, [name if description == "undefined" else description, ranks]))
    return f"{function}{sizes}, number {number} of group {group}"
