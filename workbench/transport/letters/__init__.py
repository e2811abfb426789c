"""Letters between ranks of one host, in memory that they map: who sends what, where it lies, why a wait is in vain.

``mapped`` makes the files (``pages``: large pages under them), ``arena`` hands out blocks of them, ``board`` lays out
what is beside the data, ``semaphores`` order memory, ``link`` is one rank's end to one peer, ``connecting`` makes the
links, ``mailbox`` takes letters by tag, ``waits`` ends every wait and ``ending`` the world after it. ``program`` is
what a rank does in an exchange, ``runs`` copies its slices.
"""
