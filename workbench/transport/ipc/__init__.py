"""CUDA IPC between GPU ranks of one host: ``transport`` is one rank's end, ``connect`` makes it.

``device`` is the protocol of a device, ``cuda`` a GPU. ``pool`` is a rank's device memory, ``handles`` publishes its
handles, ``events`` orders the devices' work, and ``transfers`` sends and receives.
"""
