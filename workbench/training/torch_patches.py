"""What training changes in torch; importing this module, after the tensor's own, completes both.

Clipping reads norms of global gradients, and a gradient scaler's decision is that of all ranks.
"""

from __future__ import annotations

from workbench.tensors import install  # noqa: F401 - installs the patches of torch
from workbench.training import precision
from workbench.training.gradients import clip

clip.install()
precision.install_scaler()
