"""CRC-32 of blocks that are read: zlib's, computed several times faster where the native module is built."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from twoends.kernels.built import is_built
from twoends.kernels.choose import load_module


def checksum_function() -> Callable[[memoryview], int]:
    """The fastest function that this installation has; all give the same 32 bits, and let other threads run.

    Raises NotSound when the native module is there and can't be used.
    """
    if not is_built():
        return zlib.crc32
    native = load_module()

    def native_crc32(data: memoryview) -> int:
        return int(native.crc32(np.frombuffer(data, np.uint8)))

    return native_crc32
