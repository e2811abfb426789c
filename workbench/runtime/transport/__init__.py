"""Transports behind one Protocol (``base.Transport``): torch.distributed, and threads for simulated ranks."""
