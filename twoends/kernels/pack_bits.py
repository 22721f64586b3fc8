"""How packed rows lie in memory: places of columns in a unit, and short codes as strings of bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twoends.kernels.ops import Bytes

U16 = NDArray[np.uint16]


def rotated(words: U16, left: int) -> U16:
    """Every word turned left by some bits."""
    turned: U16 = (words << np.uint16(left)) | (words >> np.uint16(16 - left))
    return turned


def to_places(by_column: U16) -> U16:
    """[rows, units, column in the unit] -> [rows, units, place]."""
    split = by_column.reshape(*by_column.shape[:2], 2, 4, 8)
    return np.ascontiguousarray(split.swapaxes(2, 3)).reshape(by_column.shape)


def to_columns(by_place: U16) -> U16:
    """The reverse of `to_places`."""
    split = by_place.reshape(*by_place.shape[:2], 4, 2, 8)
    return np.ascontiguousarray(split.swapaxes(2, 3)).reshape(by_place.shape)


def squeeze(codes: Bytes, bits: int) -> Bytes:
    """Codes, a byte each, a multiple of 8 in all -> [groups of 8, bits] bytes."""
    words = codes.reshape(-1).view("<u8")
    for step, mask in _FOLDS[bits]:
        words = (words | words >> np.uint64(step)) & np.uint64(mask)
    return np.ascontiguousarray(words[:, None].view(np.uint8)[:, :bits])


def spread(squeezed: Bytes, bits: int) -> Bytes:
    """The reverse of `squeeze`: one dimension."""
    eights = np.zeros((len(squeezed), 8), np.uint8)
    eights[:, :bits] = squeezed
    words = eights.view("<u8")[:, 0]
    mask_of_one = int.from_bytes(bytes([(1 << bits) - 1]) * 8, "little")
    masks = [mask for _, mask in _FOLDS[bits]][-2::-1]
    steps = [step for step, _ in _FOLDS[bits]][::-1]
    for step, mask in zip(steps, [*masks, mask_of_one], strict=True):
        words = (words | words << np.uint64(step)) & np.uint64(mask)
    return words.view(np.uint8)


# How the eight codes of a 64-bit word are pushed together, two, four and eight at a time.
_FOLDS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((7, 0x0003000300030003), (14, 0x0000000F0000000F), (28, 0x00000000000000FF)),
    2: ((6, 0x000F000F000F000F), (12, 0x000000FF000000FF), (24, 0x000000000000FFFF)),
    3: ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0x0000000000FFFFFF)),
    4: ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)),
}
