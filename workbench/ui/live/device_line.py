"""The GPUs of a run in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.units import format_bytes


def device_line(devices: Sequence[dict[str, float]], flops_per_s: float = 0.0) -> str:
    """What the GPUs of all ranks do; empty without any.

    Args:
        devices: by rank, the known ones of ``core.metrics.DEVICE_KINDS``.
        flops_per_s: operations per second of the training, all ranks together; 0 if unknown.

    >>> device_line([{"busy": 0.9, "used": 3e10, "total": 8e10, "pool": 2e10, "peak_flops_per_s": 1e15}], 4e14)
    'GPU: 90 % busy, 30.0 GB of 80.0 GB in use, 20.0 GB reserved by a rank, 40 % of its peak'
    """
    if not any(devices):
        return ""
    gpus = {device.get("gpu", rank): device for rank, device in enumerate(devices)}  # ranks may share one
    parts = []
    if busy := _known(gpus.values(), "busy"):
        parts.append(f"{_from_to([f'{100 * share:.0f}' for share in busy])} % busy")
    if used := _known(gpus.values(), "used"):
        total = format_bytes(max(_known(gpus.values(), "total"), default=0.0))
        parts.append(f"{_from_to([format_bytes(size) for size in used])} of {total} in use")
    if pool := _known(devices, "pool"):
        parts.append(f"{_from_to([format_bytes(size) for size in pool])} reserved by a rank")
    peaks = _known(gpus.values(), "peak_flops_per_s")
    if flops_per_s and len(peaks) == len(gpus):
        parts.append(f"{100 * flops_per_s / sum(peaks):.0f} % of {'its' if len(gpus) == 1 else 'their'} peak")
    return f"GPU{'s' * (len(gpus) > 1)}: {', '.join(parts)}"


def _known(devices: Iterable[dict[str, float]], kind: str) -> list[float]:
    """The values that are known, ascending."""
    return sorted(device[kind] for device in devices if kind in device)


def _from_to(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
