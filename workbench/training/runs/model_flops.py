"""The operations of a job's training step, for the share of the devices' peak that a run reaches."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from workbench.tensors.world import current
from workbench.training.batches import call, loss_of
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.runs.job import Job


def flops_per_sample(job: Job) -> float:
    """Multiplications and additions of matrix products, convolutions and attention, forward and backward, for a
    sample. 0 where nobody asks, because the peak of this rank's device is not known.
    """
    device = current().device
    return counted_flops(job) if "peak_flops_per_s" in DeviceMeter(device).read("fp32") else 0.0


def counted_flops(job: Job) -> float:
    """The same on any device, counted in one small step of plain torch."""
    device = current().device
    model, batch = job.model().to(device), job.first_batch().on_device(device)
    with FlopCounterMode(display=False) as counter:
        loss_of(call(model, batch.inputs), batch.targets, job.loss_fn).backward()
    return counter.get_total_flops() / batch.num_samples
