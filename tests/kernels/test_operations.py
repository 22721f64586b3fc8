"""Every other operation: native equals the reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from twoends.errors import NotSound

SIZES = [1, 15, 16, 17, 31, 32, 33, 97, 128]


@pytest.mark.parametrize("dim", [*SIZES, 7168])
def test_rms_norm(dim, native, reference, make, same):
    x_TD, w_D = make.normal(3, dim, scale=30), make.normal(dim)
    same(native.rms_norm(x_TD, w_D, 1e-5), reference.rms_norm(x_TD, w_D, 1e-5))


@pytest.mark.parametrize("dim", SIZES)
def test_l2_norm(dim, native, reference, make, same):
    x_THK = make.normal(2, 3, dim)
    x_THK[0, 0] = 0
    same(native.l2_norm(x_THK, 128**-0.5), reference.l2_norm(x_THK, 128**-0.5))


@pytest.mark.parametrize("dim", SIZES)
def test_gated_head_norm(dim, native, reference, make, same):
    arrays = make.normal(2, 3, dim), make.normal(dim), make.normal(2, 3, dim, scale=5)
    same(native.gated_head_norm(*arrays, 1e-5), reference.gated_head_norm(*arrays, 1e-5))


@pytest.mark.parametrize("channels", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_short_conv_and_its_tail(channels, num_tokens, native, reference, make, same):
    u_TP, w_P4, tail_3P = (
        make.normal(num_tokens, channels),
        make.normal(channels, 4),
        make.normal(3, channels),
    )
    tails = tail_3P.copy(), tail_3P.copy()
    same(native.short_conv(u_TP, w_P4, tails[0]), reference.short_conv(u_TP, w_P4, tails[1]))
    same(*tails)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("key_dim", SIZES)
def test_kda_decay(bound, key_dim, native, reference, make, same):
    arrays = make.normal(2, 3, key_dim, scale=20), make.normal(3, key_dim), make.normal(3)
    same(native.kda_decay(*arrays, bound), reference.kda_decay(*arrays, bound))


def kda_arrays(make, num_tokens, heads, key_dim, value_dim):
    return {
        "q_THK": make.normal(num_tokens, heads, key_dim),
        "k_THK": make.normal(num_tokens, heads, key_dim, scale=0.3),
        "v_THV": make.normal(num_tokens, heads, value_dim),
        "alpha_THK": make.rng.random((num_tokens, heads, key_dim), np.float32),
        "beta_TH": make.rng.random((num_tokens, heads), np.float32),
    }


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(1, 1), (16, 16), (5, 33), (33, 48), (32, 128), (128, 150)]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_kda_steps_and_the_state(key_dim, value_dim, num_tokens, native, reference, make, same):
    arrays = kda_arrays(make, num_tokens, 3, key_dim, value_dim)
    state = make.normal(3, key_dim, value_dim)
    states = state.copy(), state.copy()
    same(native.kda_steps(**arrays, state_HKV=states[0]), reference.kda_steps(**arrays, state_HKV=states[1]))
    same(*states)


def test_kda_steps_one_by_one_equal_all_at_once(threaded, make, same):
    arrays, state = kda_arrays(make, 5, 6, 64, 128), make.normal(6, 64, 128)
    states = state.copy(), state.copy()
    together = threaded.kda_steps(**arrays, state_HKV=states[0])
    for t in range(5):
        one = {name: a[t : t + 1].copy() for name, a in arrays.items()}
        same(threaded.kda_steps(**one, state_HKV=states[1]), together[t : t + 1])
    same(*states)


def mla_arrays(make, *, form, start, num_rows, heads, nope, rope, value, latent):
    return make.matrix(form, heads * (nope + value), latent, offset=3), {
        "q_THQ": make.normal(num_rows, heads, nope + rope),
        "cache_CM": make.normal(start + num_rows, latent + rope),
        "start": start,
        "scale": (nope + rope) ** -0.5,
    }


def mla(ops, kv_b, arrays, value, *, all_heads=None, first_head=0):
    num_rows, heads = arrays["q_THQ"].shape[:2]
    out_THV = np.full((num_rows, heads, value), np.nan, np.float32)
    num_heads = heads if all_heads is None else all_heads
    ops.mla_heads(kv_b, **arrays, first_head=first_head, num_heads=num_heads, out_THV=out_THV)
    return out_THV


MLA_DIMS = [(4, 8, 16, 32), (5, 3, 7, 33), (16, 8, 16, 95), (32, 64, 17, 128), (1, 1, 1, 1)]


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize("dims", MLA_DIMS, ids=str)
@pytest.mark.parametrize(("start", "num_rows"), [(0, 1), (0, 5), (40, 1), (15, 2), (31, 3), (17, 12)])
def test_mla_heads(form, dims, start, num_rows, native, reference, make, same):
    nope, rope, value, latent = dims
    kv_b, arrays = mla_arrays(
        make,
        form=form,
        start=start,
        num_rows=num_rows,
        heads=3,
        nope=nope,
        rope=rope,
        value=value,
        latent=latent,
    )
    same(mla(native, kv_b, arrays, value), mla(reference, kv_b, arrays, value))


@pytest.mark.parametrize(("start", "num_rows"), [(200, 1), (3, 11), (90, 2)])
def test_mla_heads_with_threads(start, num_rows, threaded, reference, make, same):
    kv_b, arrays = mla_arrays(
        make, form="bf16", start=start, num_rows=num_rows, heads=7, nope=32, rope=8, value=16, latent=64
    )
    same(mla(threaded, kv_b, arrays, 16), mla(reference, kv_b, arrays, 16))


def test_mla_writes_the_heads_it_was_given_and_no_others(native, reference, make, same):
    kv_b, arrays = mla_arrays(
        make, form="bf16", start=4, num_rows=3, heads=2, nope=8, rope=8, value=16, latent=32
    )
    arrays["q_THQ"] = make.normal(3, 7, 16)
    got = mla(native, kv_b, arrays, 16, all_heads=2, first_head=4)
    same(got, mla(reference, kv_b, arrays, 16, all_heads=2, first_head=4))
    assert np.isnan(got[:, [0, 1, 2, 3, 6]]).all()
    assert np.isfinite(got[:, 4:6]).all()


def test_a_row_of_mla_never_looks_at_later_positions(native, make, same):
    kv_b, arrays = mla_arrays(
        make, form="bf16", start=4, num_rows=6, heads=3, nope=8, rope=8, value=16, latent=32
    )
    clean = mla(native, kv_b, arrays, 16)
    arrays["cache_CM"][8:] = np.nan
    same(mla(native, kv_b, arrays, 16)[:4], clean[:4])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_mla_with_a_position_that_is_not_a_number(poison, native, reference, make, same):
    kv_b, arrays = mla_arrays(
        make, form="bf16", start=20, num_rows=4, heads=3, nope=8, rope=8, value=16, latent=32
    )
    arrays["cache_CM"][21, 5] = poison
    same(mla(native, kv_b, arrays, 16), mla(reference, kv_b, arrays, 16))


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("num_sources", [1, 2, 9, 17])
def test_attnres_mix(dim, num_sources, native, reference, make, same):
    sources_NTD, f_D = make.normal(num_sources, 3, dim, scale=4), make.normal(dim)
    same(native.attnres_mix(sources_NTD, f_D, 1e-5), reference.attnres_mix(sources_NTD, f_D, 1e-5))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (8, 2), (33, 33), (896, 16)])
def test_route(renormalize, experts, chosen, native, reference, make, same):
    logits_TE, bias_E = make.normal(6, experts), make.normal(experts, scale=0.2)
    logits_TE[1] = np.round(logits_TE[1])
    bias_E = np.round(bias_E * 8) / 8
    got = native.route(logits_TE, bias_E, chosen, renormalize, 2.446)
    expected = reference.route(logits_TE, bias_E, chosen, renormalize, 2.446)
    same(got[0], expected[0])
    same(got[1], expected[1])


def test_equal_scores_are_taken_by_lowest_id(native, make):
    ids_TS, _ = native.route(np.zeros((1, 40), np.float32), np.zeros(40, np.float32), 7, True, 1.0)
    assert ids_TS[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", ["logit", "bias"])
def test_scores_that_are_not_finite_are_an_error_that_names_the_row(where, native, reference, make):
    logits_TE, bias_E = make.normal(4, 16), make.normal(16)
    if where == "logit":
        logits_TE[2, 7] = np.nan
    else:
        bias_E[3] = np.inf
    row = 2 if where == "logit" else 0
    for ops in (native, reference):
        with pytest.raises(NotSound, match=f"scores of row {row} are not finite"):
            ops.route(logits_TE, bias_E, 4, True, 1.0)


@pytest.mark.parametrize("linear_beta", [None, 25.0])
@pytest.mark.parametrize("dim", SIZES)
def test_situ_glu(linear_beta, dim, native, reference, make, same):
    gate_TF, up_TF = make.wild(3, dim, nan=True), make.wild(3, dim, nan=True)
    same(
        native.situ_glu(gate_TF, up_TF, 4.0, linear_beta),
        reference.situ_glu(gate_TF, up_TF, 4.0, linear_beta),
    )


@pytest.mark.parametrize("name", ["silu_glu", "sigmoid_gate"])
@pytest.mark.parametrize("dim", SIZES)
def test_gates(name, dim, native, reference, make, same):
    a, b = make.wild(3, dim, nan=True), make.wild(3, dim, nan=True)
    with np.errstate(all="ignore"):
        same(getattr(native, name)(a, b), getattr(reference, name)(a, b))


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
@pytest.mark.parametrize("dim", SIZES)
def test_combine(num_ranks, dim, native, reference, make, same):
    y_TSZ, weights_TS = make.wild(3, num_ranks, dim), make.normal(3, num_ranks)
    same(native.combine(y_TSZ, weights_TS), reference.combine(y_TSZ, weights_TS))


LARGE = {
    "rms_norm": lambda ops, make: ops.rms_norm(make.normal(61, 5000), make.normal(5000), 1e-5),
    "l2_norm": lambda ops, make: ops.l2_norm(make.normal(61, 40, 128), 0.5),
    "gated_head_norm": lambda ops, make: ops.gated_head_norm(
        make.normal(61, 9, 128), make.normal(128), make.normal(61, 9, 128), 1e-5
    ),
    "kda_decay": lambda ops, make: ops.kda_decay(
        make.normal(61, 9, 128), make.normal(9, 128), make.normal(9), -5.0
    ),
    "short_conv": lambda ops, make: ops.short_conv(
        make.normal(61, 999), make.normal(999, 4), make.normal(3, 999)
    ),
    "sigmoid": lambda ops, make: ops.sigmoid(make.normal(100003)),
    "attnres_mix": lambda ops, make: ops.attnres_mix(make.normal(5, 61, 999), make.normal(999), 1e-5),
    "situ_glu": lambda ops, make: ops.situ_glu(make.normal(61, 999), make.normal(61, 999), 4.0, 25.0),
    "combine": lambda ops, make: ops.combine(make.normal(61, 8, 999), make.normal(61, 8)),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_calls_are_divided_without_a_trace(name, threaded, reference, make, same):
    state = make.rng.bit_generator.state
    got = LARGE[name](threaded, make)
    make.rng.bit_generator.state = state
    same(got, LARGE[name](reference, make))
