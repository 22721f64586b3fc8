"""What must not matter: the values of each axis of the bit contract, and how two runs are compared."""

from __future__ import annotations

from tests.support.running import PROMPT

FAMILIES = ("kimi-k3", "kimi-linear")
BUDGETS = ("floor", 0.1, "ample")
CHUNKS = (1, 3, 64, len(PROMPT))
POLICIES = ("decayed", "lru")
# How each is written: in one place, over three stripes, with the routed experts.
PACKS = {
    "none": {},
    "fixed": {"code": "fixed"},
    "entropy": {"code": "entropy"},
    "striped": {"code": "fixed", "stripes": 3},
    "experts": {"code": "entropy", "experts": True},
}
# New tokens of the reference run, and of runs that are many.
LONG = 200
SHORT = 6


def assert_same(found, expected):
    count = len(found.ids)
    assert found.ids == expected.ids[:count]
    assert found.digests == expected.digests[:count]
