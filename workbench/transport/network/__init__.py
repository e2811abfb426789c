"""torch.distributed between ranks of any hosts: ``gloo`` on CPUs, ``distributed`` over NCCL.

Why a rank waits in vain is found out by ``watch`` over gloo and by ``calls`` over NCCL; ``beats`` are signs of life of
ranks that are alone on their hosts, ``waiting`` makes waits in C++ end.
"""
