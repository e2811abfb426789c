"""The transport that engines of this host would use, and the memory that they may, found without starting any."""

from __future__ import annotations


def host_transport() -> tuple[str, str]:
    """The name of the transport, and the reason why CPU engines would not share memory (empty if they would).

    Raises:
        WorldError: the environment names a transport that does not exist.
    """
    import torch

    from workbench.transport.rendezvous import host_name
    from workbench.transport.selection import why_not_shared

    refusal = why_not_shared()
    near = "gloo" if refusal else f"shared memory inside this host ({host_name()}), gloo between hosts"
    return near + (", NCCL between GPUs, CUDA IPC on one GPU" if torch.cuda.is_available() else ""), refusal


def available_memory() -> int:
    """Bytes that processes here can still allocate; a container may have less than its host."""
    from workbench.transport.messaging.shared_memory import available_bytes

    return available_bytes()
