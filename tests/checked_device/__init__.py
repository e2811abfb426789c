"""A device of torch that needs no GPU, and finds what would fail on one or would be slow.

Its memory is the host's. It refuses a tensor of the host where a GPU does, and counts what costs time on a GPU:

>>> with counted() as counts:
...     total = torch.ones(3, device=DEVICE).sum().item()
>>> counts.waits["_local_scalar_dense"]
1
"""

from tests.checked_device.counts import Counts, counted
from tests.checked_device.device import DEVICE

__all__ = ["DEVICE", "Counts", "counted"]
