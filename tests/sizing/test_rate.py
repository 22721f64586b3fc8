"""Rates as people write them."""

from __future__ import annotations

import pytest

from twoends.errors import OptionError
from twoends.units import parse_rate


@pytest.mark.parametrize(
    ("word", "bytes_per_s"), [("6GB/s", 6e9), ("500 MB/s", 5e8), ("1.5GiB/s", 1.5 * 2**30), ("7/s", 7)]
)
def test_a_rate_is_a_size_a_second(word, bytes_per_s):
    assert parse_rate(word) == bytes_per_s


@pytest.mark.parametrize("word", ["6GB", "6GB/h", "/s", "-6GB/s", "0GB/s", "6GB/s/s", "fast"])
def test_what_is_no_rate_is_refused(word):
    with pytest.raises(OptionError, match=r"is not a (rate|size)"):
        parse_rate(word)
