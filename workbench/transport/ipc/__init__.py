"""CUDA IPC between GPU ranks of one host: ``transport`` is one rank's end, ``connecting`` makes it.

``device`` is what it asks of one, ``cuda`` the real one, ``pool`` its memory, ``catalogue`` tells peers of it,
``marks`` its order, ``parcels`` what travels.
"""
