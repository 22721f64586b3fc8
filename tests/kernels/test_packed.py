"""Packed bf16 rows: every bit pattern comes back, and products equal those of the rows themselves."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from twoends.kernels import pack_codec
from twoends.kernels.checksum import checksum_function
from twoends.kernels.ops import Matrix
from twoends.kernels.pack_codec import pack_rows, unpack_rows, widths_of


def words_like(rng, rows, cols, *, spread=0.0, wild=0.0, ones=False):
    """bf16 words of Gaussian rows; `spread` is the standard deviation of their scales in powers of two, and
    a share of `wild` is replaced by any bit pattern, NaN and subnormals included; or all of one exponent."""
    if ones:
        return (0x3F80 | rng.integers(0, 128, (rows, cols)) | rng.integers(0, 2, (rows, cols)) << 15).astype(
            np.uint16
        )
    values = rng.standard_normal((rows, cols)) * 2.0 ** (spread * rng.standard_normal((rows, 1)))
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pick = rng.random((rows, cols)) < wild
    words[pick] = rng.integers(0, 65536, int(pick.sum()))
    return words


def both(words, code="entropy"):
    """The rows packed, and as they are."""
    data = pack_rows(words, code=code)
    assert data is not None
    rows, cols = words.shape
    plain = Matrix(format="bf16", rows=rows, cols=cols, data=words.reshape(-1).view(np.uint8))
    return Matrix(format="packed", rows=rows, cols=cols, data=data), plain


CASES = {
    "3 bits": {"spread": 0.0, "wild": 0.001, "code": "fixed"},
    "4 bits": {"spread": 3.0, "wild": 0.02, "code": "fixed"},
    "three levels": {"spread": 0.0, "wild": 0.001, "code": "entropy"},
    "wide levels": {"spread": 1.5, "wild": 0.0, "code": "entropy"},
    "one exponent": {"ones": True, "code": "entropy"},
}


def packed_case(rng, rows, cols, case):
    """Words of one case, and their packed block."""
    options = dict(CASES[case])
    code = options.pop("code")
    words = words_like(rng, rows, cols, **options)
    return words, pack_rows(words, code=code)


def both_of(rng, rows, cols, case):
    """The rows of one case packed, and as they are."""
    words, _ = packed_case(rng, rows, cols, case)
    return both(words, CASES[case]["code"])


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 300)).flatmap(
        lambda shape: arrays(
            np.uint16,
            shape,
            elements=st.sampled_from(
                [0, 0x8000, 1, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80, 0xBF81, 0x3E00, 0x3D12, 0x0080]
            ),
        )
    ),
    st.sampled_from(["fixed", "entropy"]),
)
def test_any_rows_come_back_or_stay_raw(words, code):
    data = pack_rows(words, code=code)
    if data is None:
        return
    assert data.size < words.nbytes
    np.testing.assert_array_equal(unpack_rows(data, rows=words.shape[0], cols=words.shape[1]), words)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 640), (9, 333), (70, 64), (17, 1000), (2, 7168)])
def test_rows_like_trained_ones_come_back(rng, case, rows, cols):
    words, data = packed_case(rng, rows, cols, case)
    assert data is not None
    np.testing.assert_array_equal(unpack_rows(data, rows=rows, cols=cols), words)


def test_every_bit_pattern_survives_among_ordinary_values(rng):
    words = words_like(rng, 300, 7168)
    words[100:].reshape(-1)[::20][:65536] = np.arange(65536)
    data = pack_rows(words)
    assert data is not None
    np.testing.assert_array_equal(unpack_rows(data, rows=300, cols=7168), words)


@pytest.mark.parametrize(
    ("case", "widths", "ratio"),
    [
        ("3 bits", (3,), 0.705),
        ("4 bits", (4,), 0.78),
        ("three levels", (2, 2, 3), 0.671),
        ("wide levels", (3, 3), 0.74),
        ("one exponent", (2,), 0.64),
    ],
)
def test_the_smallest_code_is_taken_and_its_rate_is_as_promised(rng, case, widths, ratio):
    words, data = packed_case(rng, 100, 7168, case)
    assert widths_of(data, rows=100, cols=7168) == widths
    assert data.size / words.nbytes < ratio


@pytest.mark.parametrize("widths", [(2,), (2, 2), (2, 3), (2, 4), (2, 2, 3), (3, 3), (3,), (4,)])
def test_every_form_of_code_multiplies_alike(rng, native, make, same, multiply, monkeypatch, widths):
    """Whatever the exponents are: forms that would not be chosen for them are still decoded."""
    monkeypatch.setitem(pack_codec._WIDTHS, "entropy", (widths,))
    packed, plain = both(words_like(rng, 37, 333, spread=0.3, wild=0.001))
    assert widths_of(packed.data, rows=37, cols=333) == widths
    np.testing.assert_array_equal(
        unpack_rows(packed.data, rows=37, cols=333).view(np.uint8).reshape(-1), plain.data
    )
    for num_inputs in (1, 7):
        x_TX = make.normal(num_inputs, 333)
        same(multiply(native, packed, x_TX), multiply(native, plain, x_TX))


def test_noise_stays_raw(rng):
    assert pack_rows(rng.integers(0, 65536, (20, 640)).astype(np.uint16)) is None


@pytest.mark.parametrize("place", [0, 4, 5, 8, 12, 16, 20, 24, 128, 132])
def test_a_header_of_another_block_is_refused(rng, native, place):
    packed, _ = both(words_like(rng, 20, 640))
    data = packed.data.copy()
    data[place] ^= 0x55
    broken = Matrix(format="packed", rows=20, cols=640, data=data)
    with pytest.raises(ValueError, match="packed block"):
        unpack_rows(data, rows=20, cols=640)
    with pytest.raises(ValueError, match="packed block"):
        native.matmul(
            broken, np.zeros((1, 640), np.float32), out_TY=np.zeros((1, 20), np.float32), first_row=0
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 640), (9, 333), (33, 1029), (21, 2048), (130, 160)])
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 5, 6, 17])
def test_products_equal_those_of_the_plain_rows(
    rng, native, make, same, multiply, case, rows, cols, num_inputs
):
    packed, plain = both_of(rng, rows, cols, case)
    x_TX = make.normal(num_inputs, cols)
    same(multiply(native, packed, x_TX), multiply(native, plain, x_TX))


@pytest.mark.parametrize("case", CASES)
def test_the_numpy_definition_multiplies_packed_rows_alike(rng, reference, make, same, multiply, case):
    packed, plain = both_of(rng, 19, 333, case)
    x_TX = make.normal(3, 333)
    same(multiply(reference, packed, x_TX), multiply(reference, plain, x_TX))


@pytest.mark.parametrize("num_inputs", [1, 11])
def test_threads_change_no_bit_of_packed_products(rng, threaded, make, same, multiply, num_inputs):
    packed, plain = both(words_like(rng, 1201, 333, wild=0.001))
    x_TX = make.normal(num_inputs, 333)
    same(multiply(threaded, packed, x_TX), multiply(threaded, plain, x_TX))


@pytest.mark.parametrize("offset", [1, 33])
def test_a_packed_block_may_lie_at_any_address(rng, native, make, same, multiply, offset):
    packed, plain = both(words_like(rng, 21, 1029, wild=0.01))
    x_TX = make.normal(2, 1029)
    same(multiply(native, make.placed(packed, offset), x_TX), multiply(native, plain, x_TX))


@pytest.mark.parametrize("latent", [120, 512])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_latent_attention_takes_packed_heads(rng, native, reference, make, same, latent, num_rows):
    heads, nope, value, rope = 3, 24, 16, 8
    packed, plain = both(words_like(rng, heads * (nope + value), latent, spread=1.0))
    q_THQ, cache_CM = make.normal(num_rows, heads, nope + rope), make.normal(30 + num_rows, latent + rope)
    found = []
    for ops, kv_b in ((native, packed), (native, plain), (reference, packed)):
        out_THV = np.full((num_rows, heads, value), np.nan, np.float32)
        ops.mla_heads(
            kv_b,
            q_THQ=q_THQ,
            cache_CM=cache_CM,
            start=30,
            first_head=0,
            num_heads=heads,
            scale=0.1,
            out_THV=out_THV,
        )
        found.append(out_THV)
    same(found[0], found[1])
    same(found[2], found[1])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 1000, 4096, 100_003])
def test_the_checksum_is_zlibs(rng, size):
    data = rng.integers(0, 256, size + 1, dtype=np.uint8)[1:]
    assert checksum_function()(data.data) == zlib.crc32(data)
