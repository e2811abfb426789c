"""Messages between ranks of one host over shared memory: message rings, shared files, waits that always end.

``shared_memory`` makes the files, ``huge_pages`` backs them with huge pages, ``block_allocator`` hands out blocks,
``control_page`` lays out each rank's rings and state, ``semaphores`` order memory, ``link`` is one rank's end to one
peer, ``connect`` makes the links, ``endpoint`` receives messages by tag, ``waiter`` ends every wait and
``message_transport`` the world after it. ``transfer_plan`` is one rank's part of an exchange, ``strided_copy`` copies
its slices.
"""
