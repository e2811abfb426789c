"""Tensors of the checked device and tensors of the host over the same memory.

DLPack describes a tensor by its address and its device. A description whose device has been replaced gives the same
memory as a tensor of the other device.
"""

from __future__ import annotations

import ctypes

import torch

_HOST, _EXTENSION = 1, 12  # device types of DLPack; torch calls the second one PrivateUse1


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Description(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))  # the beginning of a DLTensor


_address_of = ctypes.pythonapi.PyCapsule_GetPointer
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device, as a tensor of the host."""
    return _same_memory(tensor, _HOST)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the host, as a tensor of the device."""
    return _same_memory(tensor, _EXTENSION)


def _same_memory(tensor: torch.Tensor, device_type: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    description = ctypes.cast(_address_of(capsule, b"dltensor"), ctypes.POINTER(_Description)).contents
    description.device.type, description.device.index = device_type, 0
    return torch._C._from_dlpack(capsule)
