"""Shared memory between CPU ranks of one host: ``transport`` is one rank's end, ``segment`` its memory.

``get`` runs an exchange, ``put`` an exchange of large rows, ``persistent`` a small exchange that repeats,
``all_reduce`` a reduction; ``shared_buffers`` holds tensors that a group of ranks fills and reads together.
"""
