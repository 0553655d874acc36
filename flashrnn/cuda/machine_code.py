"""The instructions of compiled kernels."""

import struct

# Opcodes: the lower 12 bits of a 16-byte instruction, the same from sm_80 to sm_100.
_MMA, _LOAD_LOCAL, _STORE_LOCAL = 0x23C, 0x983, 0x387


def spills_between_products(binary: bytes) -> tuple[int, int]:
    """Return how many instructions load and store spilled registers between the first and the last product.

    `binary` is an ELF file with one kernel; for PTX, return 0 and 0. In a resident kernel, these are instructions of
    the time loop, like the products.
    """
    operations = _operations(binary) if binary.startswith(b"\x7fELF") else []
    products = [k for k, operation in enumerate(operations) if operation == _MMA]
    between = operations[products[0] : products[-1]] if products else []
    return between.count(_LOAD_LOCAL), between.count(_STORE_LOCAL)


def _operations(cubin: bytes) -> list[int]:
    """Return the opcodes of the instructions, in order."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + k * size) for k in range(count)]
    for name, _, _, _, offset, length in headers:
        if cubin.startswith(b".text.flashrnn", headers[names][4] + name):
            return [struct.unpack_from("<H", cubin, at)[0] & 0xFFF for at in range(offset, offset + length, 16)]
    raise ValueError("no kernel in this file")
