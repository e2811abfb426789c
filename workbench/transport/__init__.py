"""Transports behind one Protocol (``base.Transport``); ``choice`` picks one for the ranks of a world.

* ``base``: the protocol; ``reducing``: sums in a fixed order; ``meeting``: where ranks find one another; ``processes``:
  what is seen of those on this host.
* ``letters/``: how ranks of one host talk through memory that they all map. ``shared/`` and ``ipc/`` lie on it.
* ``shared/``: mapped memory between CPU ranks of one host.
* ``ipc/``: CUDA IPC between GPU ranks of one host.
* ``network/``: torch.distributed, gloo or NCCL, and who waits for whom over it.
* ``mixed``: ``shared`` inside each host and gloo between them. ``threads``: simulated ranks.
"""
