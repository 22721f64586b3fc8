"""Packed MXFP4 scales: every byte comes back, and products equal those with the scales as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from twoends.kernels.ops import Matrix
from twoends.kernels.pack_scales import pack_scales, unpack_scales

REAL = Path(__file__).parents[3] / "shared" / "data" / "mxfp4" / "real_k3_layer1_expert0_w1.json"

# Chances of scales, the most frequent first: each calls for another form of code.
CASES = {
    "one value": [1.0],
    "two values": [0.85, 0.15],
    "as released": [0.84, 0.154, 0.006],
    "four values": [0.6, 0.2, 0.15, 0.05],
    "many values": [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01],
}


def scales_like(rng, rows, groups, case):
    """Scales with the chances of a case, the values taken at random among all bytes but NaN."""
    chances = CASES[case]
    values = rng.permutation(255)[: len(chances)].astype(np.uint8)
    return rng.choice(values, (rows, groups), p=chances)


def both(rng, rows, cols, case):
    """The same matrix with packed and with plain scales, of a size around one."""
    scale = (110 + scales_like(rng, rows, cols // 32, case) % 20).astype(np.uint8)
    data = rng.integers(0, 256, rows * cols // 2, dtype=np.uint8)
    found = pack_scales(scale)
    assert found is not None
    shape = {"format": "mxfp4", "rows": rows, "cols": cols, "data": data}
    return Matrix(**shape, scale=found), Matrix(**shape, scale=scale.reshape(-1))


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 40)).flatmap(
        lambda shape: arrays(np.uint8, shape, elements=st.sampled_from([121, 121, 121, 120, 122, 0, 255, 7]))
    )
)
def test_any_scales_come_back_or_stay_raw(scale):
    data = pack_scales(scale)
    if data is not None:
        assert data.size < scale.size
        np.testing.assert_array_equal(unpack_scales(data, rows=scale.shape[0], groups=scale.shape[1]), scale)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "groups"), [(512, 16), (300, 7), (48, 112), (1024, 1), (7, 300)])
def test_scales_like_trained_ones_come_back(rng, case, rows, groups):
    scale = scales_like(rng, rows, groups, case)
    data = pack_scales(scale)
    assert data is not None
    np.testing.assert_array_equal(unpack_scales(data, rows=rows, groups=groups), scale)


def test_noise_stays_raw(rng):
    assert pack_scales(rng.integers(0, 256, (64, 64), dtype=np.uint8)) is None


@pytest.mark.skipif(not REAL.exists(), reason="the released bytes are not here")
def test_released_scales_take_less_than_a_fifth():
    found = json.loads(REAL.read_text())["scales"]
    # One expert's matrix has 3072 rows; these 64 of them stand for all.
    scale = np.tile(np.array(found["data"], np.uint8).reshape(found["shape"]), (48, 1))
    assert pack_scales(scale).size / scale.size < 0.16


@pytest.mark.parametrize("place", [0, 4, 5, 8, 12, 16, 128])
def test_a_header_of_another_block_is_refused(rng, native, place):
    packed, _ = both(rng, 512, 512, "as released")
    data = packed.scale.copy()
    data[place] ^= 0x55
    with pytest.raises(ValueError, match="packed block"):
        unpack_scales(data, rows=512, groups=16)
    broken = Matrix(format="mxfp4", rows=512, cols=512, data=packed.data, scale=data)
    with pytest.raises(ValueError, match="packed block"):
        native.matmul(
            broken, np.zeros((1, 512), np.float32), out_TY=np.zeros((1, 512), np.float32), first_row=0
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "cols"), [(512, 512), (333, 224), (50, 3584)])
@pytest.mark.parametrize("num_inputs", [1, 3, 17])
def test_products_equal_those_of_plain_scales(
    rng, native, make, same, multiply, case, rows, cols, num_inputs
):
    packed, plain = both(rng, rows, cols, case)
    x_TX = make.normal(num_inputs, cols)
    same(multiply(native, packed, x_TX), multiply(native, plain, x_TX))


def test_the_numpy_definition_multiplies_packed_scales_alike(rng, reference, make, same, multiply):
    packed, plain = both(rng, 100, 224, "four values")
    x_TX = make.normal(2, 224)
    same(multiply(reference, packed, x_TX), multiply(reference, plain, x_TX))


@pytest.mark.parametrize("num_inputs", [1, 11])
def test_threads_change_no_bit(rng, threaded, make, same, multiply, num_inputs):
    packed, plain = both(rng, 1201, 512, "as released")
    x_TX = make.normal(num_inputs, 512)
    same(multiply(threaded, packed, x_TX), multiply(threaded, plain, x_TX))
