"""Shared memory between CPU ranks of one host: ``transport`` is one rank's end.

``segment`` is its memory, ``pulling`` runs an exchange, ``pushing`` one of large rows, ``steady`` a small one that
comes again, ``sums`` a reduction.
"""
