"""torch.distributed between ranks of any hosts: ``gloo`` on CPUs, ``distributed`` over NCCL.

``hang_detector`` finds out over gloo why a rank waits, ``nccl_watchdog`` over NCCL. ``heartbeat`` shows that ranks
alone on their hosts are alive; ``helper_thread`` makes waits in C++ interruptible.
"""
