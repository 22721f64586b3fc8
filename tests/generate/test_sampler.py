"""The draw as docs/contracts.md states it, against a plain rendering in Python numbers."""

from __future__ import annotations

import math
import re
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoends.errors import NotSound, OptionError
from twoends.generate.sampler import Sampling, pick, uniform
from twoends.kernels.reference.elementary import exp

GREEDY = Sampling()
# few distinct values, so that ties stand at every border
LOGITS = st.lists(
    st.sampled_from([-200.0, -3.0, -0.5, -0.0, 0.0, 0.25, 1.0, 1.0000001, 9.0, 3e38, -3e38])
    | st.floats(-30, 30, width=32),
    min_size=1,
    max_size=40,
).map(lambda values: np.array(values, dtype=np.float32))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.7, 1e6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 39, 40, 41, 10**9]),
    seed=st.integers(0, 2**64 - 1),
)


def picked_plainly(logits: list[float], sampling: Sampling, *, position: int) -> int:
    """The definition, one number at a time: binary64 Python floats, binary32 where it says so."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if sampling.temperature == 0:
        return order[0]
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = []
    with np.errstate(over="ignore", under="ignore"):
        for token_id in kept:
            scaled = (np.float32(logits[token_id]) - np.float32(logits[order[0]])) / np.float32(
                sampling.temperature
            )
            weights.append(float(exp(np.array([scaled], dtype=np.float32))[0]))
    totals = list(accumulate(weights))
    last = next(at for at, total in enumerate(totals) if total >= sampling.top_p * totals[-1])
    drawn = uniform(seed=sampling.seed, position=position) * totals[last]
    return next(token_id for token_id, total in zip(kept, totals, strict=True) if total > drawn)


@given(logits=LOGITS, sampling=SAMPLINGS, position=st.integers(0, 2**40))
@settings(max_examples=400, deadline=None)
def test_a_draw_is_the_plain_definition(logits: np.ndarray, sampling: Sampling, position: int) -> None:
    plain = picked_plainly(logits.tolist(), sampling, position=position)
    assert pick(logits, sampling, position=position) == plain


@pytest.mark.parametrize("width", [8_191, 163_840])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_draw_from_a_whole_vocabulary_is_the_plain_definition(width: int, top_k: int) -> None:
    logits = np.random.default_rng(width).standard_normal(width).astype(np.float32) * np.float32(4)
    logits[-5:] = logits.max()
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=top_k, seed=3)
    got = pick(logits, sampling, position=17)
    assert isinstance(got, int)
    order = np.lexsort((np.arange(width), -logits))[: top_k or None]
    weights = exp((logits[order] - logits[order[0]]) / np.float32(0.8)).tolist()
    totals = list(accumulate(weights))
    last = next(at for at, total in enumerate(totals) if total >= 0.95 * totals[-1])
    drawn = uniform(seed=3, position=17) * totals[last]
    assert got == order[next(at for at, total in enumerate(totals) if total > drawn)]


def test_running_totals_are_added_one_after_the_other() -> None:
    # the definition leans on this property of np.cumsum; a pairwise sum would differ
    weights = np.exp(np.random.default_rng(2).standard_normal(163_840) * 4)
    assert np.cumsum(weights.astype(np.float32), dtype=np.float64).tolist() == list(
        accumulate(weights.astype(np.float32).tolist())
    )


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert pick(np.array([0.5, 2, -1, 2, 2], dtype=np.float32), GREEDY, position=0) == 1


def test_minus_zero_ties_with_zero() -> None:
    logits = np.array([-0.0, 0.0], dtype=np.float32)
    assert pick(logits, GREEDY, position=0) == 0
    assert pick(logits, Sampling(temperature=1, top_k=1), position=0) == 0
    assert pick(logits[::-1].copy(), Sampling(temperature=1, top_k=1), position=0) == 0


def test_top_k_keeps_the_lowest_ids_of_those_that_tie() -> None:
    logits = np.array([1, 3, 2, 2, 2, 3], dtype=np.float32)
    sampling = [Sampling(temperature=100, top_k=4, seed=seed) for seed in range(200)]
    assert {pick(logits, each, position=0) for each in sampling} == {1, 5, 2, 3}


def test_top_p_keeps_the_token_that_reaches_the_share() -> None:
    # four equal tokens: two reach a half, the third is needed for anything above
    logits = np.zeros(4, dtype=np.float32)
    half = [Sampling(temperature=1, top_p=0.5, seed=seed) for seed in range(200)]
    above = [Sampling(temperature=1, top_p=0.500001, seed=seed) for seed in range(200)]
    assert {pick(logits, each, position=0) for each in half} == {0, 1}
    assert {pick(logits, each, position=0) for each in above} == {0, 1, 2}


def test_top_p_of_almost_nothing_keeps_the_likeliest() -> None:
    logits = np.array([1, 2, 1.5], dtype=np.float32)
    assert {pick(logits, Sampling(temperature=9, top_p=1e-300, seed=s), position=0) for s in range(50)} == {1}


def test_a_token_whose_weight_underflows_is_never_drawn() -> None:
    logits = np.full(1000, -300, dtype=np.float32)
    logits[7] = 0
    assert {pick(logits, Sampling(temperature=1, seed=s), position=s) for s in range(200)} == {7}


def test_the_widest_logits_and_least_temperature_overflow_to_greedy() -> None:
    logits = np.array([-3.4e38, 3.4e38, 3.3e38], dtype=np.float32)
    assert pick(logits, Sampling(temperature=1e-6), position=0) == 1


@pytest.mark.parametrize(
    ("number", "expected"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2.0**-53, 3)]
)
def test_a_number_on_a_border_draws_the_token_that_begins_there(
    monkeypatch: pytest.MonkeyPatch, number: float, expected: int
) -> None:
    # four equal tokens: their running totals are 1, 2, 3 and 4, exactly
    monkeypatch.setattr("twoends.generate.sampler.uniform", lambda *, seed, position: number)
    assert pick(np.zeros(4, dtype=np.float32), Sampling(temperature=1), position=0) == expected


def test_position_and_seed_each_change_the_draws() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    by_position = [pick(logits, Sampling(temperature=1, seed=5), position=p) for p in range(20)]
    by_seed = [pick(logits, Sampling(temperature=1, seed=s), position=5) for s in range(20)]
    assert len(set(by_position)) > 15
    assert len(set(by_seed)) > 15
    assert by_position[5] == by_seed[5]


def test_the_same_logits_settings_and_position_give_the_same_id() -> None:
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    sampling = Sampling(temperature=1.3, top_p=0.9, top_k=100, seed=8)
    before = logits.copy()
    assert len({pick(logits, sampling, position=44) for _ in range(5)}) == 1
    np.testing.assert_array_equal(logits, before)


# These bits are promised to every later version. Made with CPython 3.11 by
#   digest = blake2b(pack("<QQ", seed, position), digest_size=8, person=b"twoends.draw").digest()
#   ((int.from_bytes(digest, "little") >> 11) * 2.0**-53).hex()
@pytest.mark.parametrize(
    ("seed", "position", "value"),
    [
        (0, 0, "0x1.8293c4ada7029p-1"),
        (0, 1, "0x1.457cbaaceb20cp-3"),
        (1, 0, "0x1.8747630e6ac14p-3"),
        (18446744073709551615, 1099511627776, "0x1.ba3e9317440d4p-3"),
        (42, 1048575, "0x1.312729c160763p-1"),
    ],
)
def test_the_generator_keeps_its_bits(seed: int, position: int, value: str) -> None:
    assert uniform(seed=seed, position=position) == float.fromhex(value)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**64 - 1))
def test_a_uniform_number_is_below_one_and_a_multiple_of_2_to_minus_53(seed: int, position: int) -> None:
    value = uniform(seed=seed, position=position)
    assert 0 <= value < 1
    assert (value * 2.0**53).is_integer()


def test_uniform_numbers_spread_evenly() -> None:
    # 4,096 draws in 16 bins: chi-square with 15 degrees of freedom is below 44.3 in all but 1 in 10^4
    # sets; the draws are fixed, so this can't fail by chance.
    values = np.array([uniform(seed=s, position=p) for s in range(4) for p in range(1024)])
    counts = np.bincount((values * 16).astype(int), minlength=16)
    assert ((counts - 256) ** 2 / 256).sum() < 44.3


@given(total=st.floats(1, 2**60))
def test_a_draw_is_always_below_its_total(total: float) -> None:
    # so that an id always exceeds it: the largest uniform number times any total rounds below the total
    assert (1 - 2.0**-53) * total < total


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_give_no_token(bad: float, sampling: Sampling) -> None:
    logits = np.ones(10, dtype=np.float32)
    logits[[3, 8]] = bad
    message = r"logits for position 1,234 are not finite: 2 of 10 .*(.|\n)*token id 3 "
    with pytest.raises(NotSound, match=message):
        pick(logits, sampling, position=1234)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy), or 1e-06 to 1e+06"),
        ("temperature", 1e-7, "0 (greedy), or 1e-06 to 1e+06"),
        ("temperature", 2e6, "0 (greedy), or 1e-06 to 1e+06"),
        ("temperature", math.nan, "a finite number"),
        ("temperature", True, "a finite number"),
        ("temperature", "1", "a finite number"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("top_p", math.nan, "a finite number"),
        ("top_k", -1, "0 (keeps every token) or more"),
        ("top_k", 2.0, "a whole number"),
        ("top_k", False, "a whole number"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 1 << 64, "0 to 18446744073709551615"),
        ("seed", 0.5, "a whole number"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(option: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{option} is {value!r}; it must be {allowed}")):
        Sampling(**{option: value})
