"""Transports behind one Protocol (``base.Transport``), chosen by ``choice``.

* ``shared``: mapped memory between CPU ranks of one host. ``mapped`` makes the files, ``arena`` hands out blocks of
  them, ``board`` lays out what is beside the data, ``link`` is one rank's end to one peer, ``waits`` ends every wait.
* ``distributed``: torch.distributed, gloo or NCCL.
* ``threads``: simulated ranks.
"""
