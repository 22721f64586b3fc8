"""Matrix products: native equals the reference whatever the shape, alignment, threads or rows per call."""

from __future__ import annotations

import numpy as np
import pytest

from twoends.kernels.reference.matmul import row_slice

FORMATS = ["bf16", "f32", "mxfp4"]
NUM_INPUTS = [1, 2, 3, 5, 6, 7, 8, 16, 17]
COLS = {"bf16": [1, 2, 31, 32, 33, 95, 320], "f32": [1, 2, 31, 32, 33, 95, 320], "mxfp4": [32, 64, 320]}
SHAPES = [(form, cols) for form in FORMATS for cols in COLS[form]]


@pytest.mark.parametrize("num_inputs", NUM_INPUTS)
@pytest.mark.parametrize("form", FORMATS)
def test_any_number_of_inputs_gives_the_reference(form, num_inputs, native, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, 37, 96), make.normal(num_inputs, 96)
    same(multiply(native, matrix, x_TX), multiply(reference, matrix, x_TX))


@pytest.mark.parametrize(("form", "cols"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 21])
def test_any_shape_gives_the_reference(form, cols, rows, native, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, rows, cols), make.normal(3, cols)
    same(multiply(native, matrix, x_TX), multiply(reference, matrix, x_TX))


@pytest.mark.parametrize("offset", [1, 2, 7, 33, 63])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_inputs", [1, 9])
def test_weights_may_lie_at_any_address(form, offset, num_inputs, native, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, 19, 160, offset=0), make.normal(num_inputs, 160)
    expected = multiply(reference, matrix, x_TX)
    same(multiply(native, make.placed(matrix, offset), x_TX), expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_inputs", [1, 6])
def test_special_values_give_the_reference(form, num_inputs, native, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, 64, 64, wild=True), make.wild(num_inputs, 64)
    same(multiply(native, matrix, x_TX), multiply(reference, matrix, x_TX))


@pytest.mark.parametrize("form", FORMATS)
def test_nan_and_infinity_in_an_input_stay_in_its_row(form, native, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, 21, 96), make.normal(5, 96)
    x_TX[1, 3], x_TX[3, 95] = np.nan, np.inf
    got = multiply(native, matrix, x_TX)
    same(got, multiply(reference, matrix, x_TX))
    assert np.isfinite(got[[0, 2, 4]]).all()


@pytest.mark.parametrize("scale_byte", [0, 1, 126, 127, 254, 255])
def test_every_code_with_the_extreme_scales_gives_the_reference(
    scale_byte, native, reference, make, same, multiply
):
    matrix = make.matrix("mxfp4", 8, 32)
    data = np.arange(8 * 16, dtype=np.uint8) * 2 + np.arange(8).repeat(16).astype(np.uint8) % 2
    matrix = type(matrix)(format="mxfp4", rows=8, cols=32, data=data, scale=np.full(8, scale_byte, np.uint8))
    x_TX = make.wild(4, 32)
    same(multiply(native, matrix, x_TX), multiply(reference, matrix, x_TX))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_inputs", [1, 11])
def test_threads_change_no_bit(form, num_inputs, threaded, reference, make, same, multiply):
    matrix, x_TX = make.matrix(form, 2101, 128), make.normal(num_inputs, 128)
    same(multiply(threaded, matrix, x_TX), multiply(reference, matrix, x_TX))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 2), (3, 16), (15, 33)])
def test_a_slice_of_rows_equals_the_whole(form, start, stop, native, make, same, multiply):
    matrix, x_TX = make.matrix(form, 33, 96), make.normal(3, 96)
    whole = multiply(native, matrix, x_TX)
    same(multiply(native, row_slice(matrix, start, stop), x_TX), whole[:, start:stop].copy())


@pytest.mark.parametrize("form", FORMATS)
def test_only_the_promised_columns_are_written(form, native, make, multiply):
    matrix, x_TX = make.matrix(form, 21, 64), make.normal(7, 64)
    out_TY = multiply(native, matrix, x_TX, room=9, first_row=4)
    assert np.isfinite(out_TY[:, 4:25]).all()
    assert np.isnan(out_TY[:, :4]).all()
    assert np.isnan(out_TY[:, 25:]).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_does_not_depend_on_the_rows_beside_it(form, native, make, same, multiply):
    matrix, x_TX = make.matrix(form, 45, 96), make.normal(17, 96)
    together = multiply(native, matrix, x_TX)
    for t in range(17):
        same(multiply(native, matrix, x_TX[t : t + 1]), together[t : t + 1])


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, out: (x.astype(np.float64), out),
        lambda x, out: (x.T.copy().T, out),
        lambda x, out: (x[:, :32].copy(), out),
        lambda x, out: (x, out[:, :10].copy()),
        lambda x, out: (x, out.astype(np.float64)),
        lambda x, out: (x, np.asfortranarray(out)),
    ],
    ids=["x-float64", "x-not-contiguous", "x-narrow", "out-narrow", "out-float64", "out-not-contiguous"],
)
def test_arrays_of_another_kind_are_refused(bad, native, make):
    matrix = make.matrix("bf16", 21, 64)
    x_TX, out_TY = bad(make.normal(2, 64), np.zeros((2, 21), np.float32))
    with pytest.raises((TypeError, ValueError)):
        native.matmul(matrix, x_TX, out_TY=out_TY, first_row=0)
    assert not out_TY.any()
