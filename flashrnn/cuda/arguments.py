"""The arguments of kernels: checked against their parameters, and packed for the driver."""

import ctypes
import struct
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from flashrnn.cuda.parameters import Parameters

Argument = Tensor | int | None  # a number or an address; None is a null pointer


def check(parameters: Parameters, arguments: Mapping[str, Argument]) -> None:
    """Raise TypeError if a tensor does not match its parameter.

    Tensors of bytes and empty tensors are accepted for any.
    """
    for one in parameters:
        x = arguments[one.name]
        if not isinstance(x, Tensor) or not x.numel() or x.dtype == torch.uint8 or one.dtype is None:
            continue
        shape = [arguments[size] if isinstance(size, str) else size for size in one.shape]
        if x.dtype != one.dtype or (shape and x.numel() != prod(shape)):
            wanted = f"{one.dtype} {shape or ''}".strip()
            raise TypeError(f"the kernel's {one.name} ({one.type}) must be {wanted}; got {x.dtype} {list(x.shape)}")


class Packed:
    """The arguments of a kernel in the memory layout that the driver takes. The last ones may be bound in advance."""

    def __init__(self, parameters: Parameters, known: Mapping[str, int]) -> None:
        names = [one.name for one in parameters]
        self._parameters, self._known, self._checked = parameters, dict(known), False
        self._names = tuple(names[: len(names) - len(known)])
        if set(names[len(self._names) :]) != set(known):
            raise TypeError(f"only the last of {names} can be bound in advance, not {list(known)}")
        self._values = (ctypes.c_int64 * len(names))(*(known.get(name, 0) for name in names))
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(names))(*range(first, first + 8 * len(names), 8))
        self._pack = struct.Struct(f"{len(self._names)}q").pack_into
        self.address = ctypes.addressof(self._pointers)  # of the array of addresses of all arguments

    def pack(self, arguments: Mapping[str, Argument]) -> None:
        """Pack the arguments that are not bound. Their types are checked the first time."""
        if tuple(arguments) != self._names:
            arguments = self._in_order(arguments)
        if not self._checked:
            check(self._parameters, {**arguments, **self._known})
            self._checked = True
        values = [a if type(a) is int else 0 if a is None else a.data_ptr() for a in arguments.values()]
        self._pack(self._values, 0, *values)

    def _in_order(self, arguments: Mapping[str, Argument]) -> Mapping[str, Argument]:
        if wrong := set(self._names).symmetric_difference(arguments):
            raise TypeError(f"the kernel takes {self._names}; missing or unknown: {sorted(wrong)}")
        return {name: arguments[name] for name in self._names}
