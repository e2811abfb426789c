"""Transports behind one protocol (``base.Transport``); ``selection`` selects one for the ranks of a world.

* ``base``: the protocol; ``reduction``: local reductions in a fixed order; ``rendezvous``: how ranks join a world,
  and ``held_interrupt`` what waits meanwhile; ``peer_processes``: the state of peers' processes on this host.
* ``messaging/``: messages between ranks of one host over shared memory, the base of ``shared/`` and ``ipc/``.
* ``shared/``: shared memory between CPU ranks of one host.
* ``ipc/``: CUDA IPC between ranks of one host that share a GPU.
* ``network/``: torch.distributed (gloo or NCCL), with detection of hangs.
* ``mixed``: ``shared`` inside each host and gloo between hosts. ``threads``: simulated ranks. ``fake``: dry runs.
"""
