"""Sizes, rates and durations as people write them. GB is 10^9 bytes; GiB is 2^30."""

from __future__ import annotations

import re

from twoends.errors import OptionError

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes meant by "8GB", "600 MB", "1.5GiB" or "4096". Raises OptionError."""
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).upper() not in _FACTORS:
        raise OptionError(
            f"'{text}' is not a size.",
            remedies=["Write a number and a unit:  8GB, 600MB, 1.5GiB  (GB is 10^9 bytes, GiB is 2^30)"],
        )
    size = float(match.group(1)) * _FACTORS[match.group(2).upper()]
    if size < 1:
        raise OptionError(f"'{text}' is not a size above zero.")
    return round(size)


def format_bytes(num_bytes: int | float) -> str:
    """ "108.81 GB", "14.3 MB", "512 B": decimal units, three or more digits kept."""
    size = float(num_bytes)
    for unit, factor, digits in (("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("KB", 1e3, 1)):
        if abs(size) >= factor:
            return f"{size / factor:,.{digits}f} {unit}"
    return f"{size:,.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """ "3.20 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_duration(seconds: float) -> str:
    """ "35 ms", "4.21 s", "3 min 05 s", "2 h 10 min"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def parse_rate(text: str) -> float:
    """Bytes per second meant by "6GB/s" or "500 MB/s". Raises OptionError."""
    size, slash, per = text.partition("/")
    if not slash or per.strip() != "s":
        raise OptionError(f"'{text}' is not a rate.", remedies=["Write a size per second:  6GB/s, 500MB/s"])
    return float(parse_bytes(size))
