"""Operations against another implementation's results: 1e-5 absolute, 1e-4 relative, as its makers state."""

from __future__ import annotations

import numpy as np
import pytest

from twoends.kernels.native_ops import native_ops
from twoends.kernels.ops import Matrix
from twoends.kernels.reference import reference_ops


@pytest.fixture(params=["reference", "native"])
def ops(request, isa):
    if request.param == "native":
        return native_ops(isa, 2)
    if isa != "plain":
        pytest.skip("the reference has no instruction sets")
    return reference_ops()


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def f32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def linear(ops, weight, x: np.ndarray) -> np.ndarray:
    w = f32(weight)
    matrix = Matrix(format="f32", rows=w.shape[0], cols=w.shape[1], data=w.reshape(-1).view(np.uint8))
    rows = f32(x).reshape(-1, w.shape[1])
    out_TY = np.full((rows.shape[0], w.shape[0]), np.nan, np.float32)
    ops.matmul(matrix, rows, out_TY=out_TY, first_row=0)
    return out_TY


def test_rmsnorm(ops, op_fixture):
    f = op_fixture("rmsnorm")
    close(ops.rms_norm(f32(f["in"]), f32(f["weight"]), f["eps"]), f["out"])


def test_situ_glu(ops, op_fixture):
    f = op_fixture("situ_glu")
    gate_TF, up_TF = np.split(f32(f["in"]), 2, axis=-1)
    close(ops.situ_glu(f32(gate_TF), f32(up_TF), f["beta"], f["linear_beta"]), f["out"])


def test_shortconv_and_the_step_after_it(ops, op_fixture):
    f = op_fixture("shortconv")
    w_P4, channels = f32(f["weight"].reshape(-1, 4)), f["channels"]
    tail_3P = np.zeros((3, channels), np.float32)
    close(ops.short_conv(f32(f["in"].reshape(-1, channels)), w_P4, tail_3P), f["out"])
    close(np.ascontiguousarray(tail_3P.T), f["state_after"])
    close(ops.short_conv(f32(f["in_next"].reshape(-1, channels)), w_P4, tail_3P), f["out_next"])


def test_kda_decay(ops, op_fixture):
    f = op_fixture("kda_decay")
    heads = f["A_log"].size
    key_dim = f["dt_bias"].size // heads
    z_THK = f32(f["z"].reshape(-1, heads, key_dim))
    alpha = ops.kda_decay(z_THK, f32(f["dt_bias"].reshape(heads, key_dim)), f32(f["A_log"]), f["lower_bound"])
    close(alpha, f["alpha"])


@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
def test_kda_recurrence(name, ops, op_fixture):
    f = op_fixture(name)
    state_HKV = np.zeros((f["H"], f["d_k"], f["d_v"]), np.float32)
    out = ops.kda_steps(
        q_THK=f32(f["q"]) * np.float32(f["q_scale"]),
        k_THK=f32(f["k"]),
        v_THV=f32(f["v"]),
        alpha_THK=f32(f["alpha"]),
        beta_TH=f32(f["beta"]),
        state_HKV=state_HKV,
    )
    close(out, f["out"])
    close(state_HKV, f["state_out"])


def test_router(ops, op_fixture):
    f = op_fixture("router")
    logits = linear(ops, f["gate_weight"], f["in"])
    scaling = float(f["topk_weight"][0].sum())
    ids, weights = ops.route(logits, f32(f["bias"]), f["top_k"], True, scaling)
    by_id, expected_by_id = np.argsort(ids, axis=1), np.argsort(f["topk_idx"], axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(ids, by_id, 1),
        np.take_along_axis(f["topk_idx"].astype(np.int32), expected_by_id, 1),
    )
    close(np.take_along_axis(weights, by_id, 1), np.take_along_axis(f["topk_weight"], expected_by_id, 1))


def test_attnres(ops, op_fixture):
    f = op_fixture("attnres")
    blocks, prefix = f["block_residual"], f["prefix_sum"]
    if blocks.shape[0] == prefix.shape[0]:
        blocks = blocks.transpose(1, 0, 2)
    sources_NTD = f32(np.concatenate([blocks, prefix[None]]))
    assert sources_NTD.shape[0] == f["n_sources"]
    close(ops.attnres_mix(sources_NTD, f32(f["norm_weight"] * f["proj_weight"]), f["eps"]), f["out"])


def test_mla(ops, op_fixture):
    f = op_fixture("mla")
    heads, nope, rope, value = f["n_heads"], f["qk_nope"], f["qk_rope"], f["v_head"]
    x = f["in"].reshape(-1, f["in"].shape[-1])
    eps = f["rms_eps"]
    q_a = ops.rms_norm(linear(ops, f["q_a_proj_weight"], x), f32(f["q_a_layernorm_weight"]), eps)
    q_THQ = linear(ops, f["q_b_proj_weight"], q_a).reshape(-1, heads, nope + rope)
    kv = linear(ops, f["kv_a_proj_with_mqa_weight"], x)
    latent = ops.rms_norm(f32(kv[:, : f["kv_lora"]]), f32(f["kv_a_layernorm_weight"]), eps)
    close(latent, f["kv_latent"].reshape(latent.shape))
    w = f32(f["kv_b_proj_weight"])
    kv_b = Matrix(format="f32", rows=w.shape[0], cols=w.shape[1], data=w.reshape(-1).view(np.uint8))
    out_THV = np.full((x.shape[0], heads, value), np.nan, np.float32)
    ops.mla_heads(
        kv_b,
        q_THQ=q_THQ,
        cache_CM=np.concatenate([latent, kv[:, f["kv_lora"] :]], axis=1),
        start=0,
        first_head=0,
        num_heads=heads,
        scale=f["scale"],
        out_THV=out_THV,
    )
    gated = ops.sigmoid_gate(out_THV.reshape(x.shape[0], -1), linear(ops, f["g_proj_weight"], x))
    close(linear(ops, f["o_proj_weight"], gated), f["out"])
