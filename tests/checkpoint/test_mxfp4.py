"""The 4-bit block format, exact both ways."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twoends.checkpoint import mxfp4
from twoends.errors import NotSound

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
finite_weights = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 96])),
    elements=st.floats(width=32, min_value=-1.5 * 2.0**127, max_value=1.5 * 2.0**127),
)  # fmt: skip


def every_byte_under(scale_byte: int) -> tuple[np.ndarray, np.ndarray]:
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    return packed, np.full((16, 1), scale_byte, dtype=np.uint8)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_real_released_bytes_decode_exactly_and_come_back(shared_data: Path) -> None:
    real = json.loads((shared_data / "mxfp4" / "real_k3_layer1_expert0_w1.json").read_text())
    packed, scale = (
        np.array(real[name]["data"], dtype=np.uint8).reshape(real[name]["shape"])
        for name in ("packed", "scales")
    )
    expected = np.array(real["expected"]["data"], dtype=np.float32).reshape(real["expected"]["shape"])
    weights = mxfp4.decode(packed, scale)
    assert np.array_equal(weights, expected)
    assert np.array_equal(mxfp4.recode(weights, scale), packed)


def test_the_low_nibble_is_the_even_column() -> None:
    packed = np.zeros((1, 16), dtype=np.uint8)
    packed[0, :2] = [0x21, 0x9F]
    weights = mxfp4.decode(packed, np.array([[126]], dtype=np.uint8))
    assert weights[0, :4].tolist() == [0.25, 0.5, -3.0, -0.25]


def test_minus_zero_keeps_its_sign() -> None:
    packed = np.full((1, 16), 0x80, dtype=np.uint8)
    weights = mxfp4.decode(packed, np.array([[127]], dtype=np.uint8))
    assert np.signbit(weights).tolist() == [[False, True] * 16]
    assert np.array_equal(mxfp4.encode(weights)[0], packed)


@pytest.mark.parametrize("scale_byte", [0, 1, 2, 64, 126, 127, 128, 250, 252])
def test_every_code_has_its_exact_value(scale_byte: int) -> None:
    packed, scale = every_byte_under(scale_byte)
    weights = mxfp4.decode(packed, scale).reshape(-1, 2)
    multiplier = Fraction(2) ** (scale_byte - 127)
    for byte in range(256):
        for weight, code in zip(weights[byte], (byte & 15, byte >> 4), strict=True):
            assert Fraction(float(weight)) == (-1) ** (code >> 3) * Fraction(VALUES[code & 7]) * multiplier
            assert np.signbit(weight) == (code >= 8)


def test_bytes_come_back_under_every_scale_that_binary32_can_hold() -> None:
    for scale_byte in range(253):
        packed, scale = every_byte_under(scale_byte)
        assert np.array_equal(mxfp4.recode(mxfp4.decode(packed, scale), scale), packed), scale_byte


@pytest.mark.parametrize(("scale_byte", "first_infinite"), [(253, 4.0), (254, 2.0)])
def test_values_beyond_binary32_decode_to_infinity(scale_byte: int, first_infinite: float) -> None:
    packed, scale = every_byte_under(scale_byte)
    unscaled = mxfp4.decode(packed, np.full_like(scale, 127))
    weights = mxfp4.decode(packed, scale)
    assert np.array_equal(np.isinf(weights), np.abs(unscaled) >= first_infinite)
    with pytest.raises(NotSound, match="is not a value of its MXFP4 group"):
        mxfp4.recode(weights, scale)


def test_scale_255_makes_its_whole_group_nan_and_no_other() -> None:
    packed = np.zeros((1, 32), dtype=np.uint8)
    weights = mxfp4.decode(packed, np.array([[255, 127]], dtype=np.uint8))
    assert np.isnan(weights[0, :32]).all()
    assert (weights[0, 32:] == 0).all()


@pytest.mark.parametrize(
    ("amax", "scale_byte"),
    [
        (6.0, 127), (np.nextafter(np.float32(6), np.float32(7)), 128), (3.0, 126), (3.0000002, 127),
        (4.0, 127), (1.5 * 2.0**-100, 25), (2.0**-149, 0), (1.7 * 2.0**127, 253), (0.0, 127),
    ],
)  # fmt: skip
def test_the_scale_is_the_smallest_power_under_which_nothing_saturates(amax: float, scale_byte: int) -> None:
    weights = np.zeros((1, 32), dtype=np.float32)
    weights[0, 7] = -np.float32(amax)
    _, scale = mxfp4.encode(weights)
    assert scale.tolist() == [[scale_byte]]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (5.0000005, 7),
        (0.2500001, 1),
    ],
)
def test_halfway_values_round_to_the_even_code(value: float, code: int) -> None:
    weights = np.zeros((1, 32), dtype=np.float32)
    weights[0, 0], weights[0, 1] = 6.0, -np.float32(value)
    packed, scale = mxfp4.encode(weights)
    assert scale[0, 0] == 127
    assert packed[0, 0] >> 4 == 8 + code


@given(finite_weights)
def test_encoding_errs_by_at_most_half_a_step_and_keeps_signs(weights: np.ndarray) -> None:
    packed, scale = mxfp4.encode(weights)
    back = mxfp4.decode(packed, scale).astype(np.float64)
    # The widest step of the grid is 2 (from 4 to 6) times the multiplier.
    bound = np.repeat(np.ldexp(1.0, scale.astype(np.int32) - 127), 32, axis=1)
    assert (np.abs(back - weights.astype(np.float64)) <= bound).all()
    assert np.array_equal(np.signbit(back), np.signbit(weights))


@given(finite_weights)
def test_encoding_decoded_weights_keeps_every_value(weights: np.ndarray) -> None:
    once = mxfp4.decode(*mxfp4.encode(weights))
    assert same_bits(mxfp4.decode(*mxfp4.encode(once)), once)


@given(
    hnp.arrays(np.uint8, (2, 32)),
    hnp.arrays(np.uint8, (2, 2), elements=st.integers(0, 252)),
)
def test_recode_inverts_decode(packed: np.ndarray, scale: np.ndarray) -> None:
    assert np.array_equal(mxfp4.recode(mxfp4.decode(packed, scale), scale), packed)


def test_a_value_that_would_round_to_infinity_is_refused() -> None:
    weights = np.full((1, 32), np.finfo(np.float32).max)
    with pytest.raises(NotSound, match="Row 0 has a value that is too large"):
        mxfp4.encode(weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    weights = np.ones((3, 64), dtype=np.float32)
    weights[2, 40] = bad
    with pytest.raises(NotSound, match="Row 2 has a value that is not finite") as caught:
        mxfp4.encode(weights)
    assert "32 to 63" in str(caught.value)


def test_recode_refuses_a_weight_between_two_values() -> None:
    weights = np.zeros((1, 32), dtype=np.float32)
    weights[0, 5] = 0.7
    with pytest.raises(NotSound, match="row 0, column 5"):
        mxfp4.recode(weights, np.array([[127]], dtype=np.uint8))


@pytest.mark.parametrize(
    ("packed", "scale"), [((2, 16), (2, 2)), ((2, 15), (2, 1)), ((2, 16), (1, 1))], ids=str
)
def test_shapes_that_do_not_belong_together_are_refused(packed: tuple[int], scale: tuple[int]) -> None:
    with pytest.raises(ValueError, match="needs scale"):
        mxfp4.decode(np.zeros(packed, dtype=np.uint8), np.zeros(scale, dtype=np.uint8))
