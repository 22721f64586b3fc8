"""Each operation beside the same formula in PyTorch's binary64, written here from the specification.

Bounds are in units of binary32: EPS is half a unit of 1, the largest relative error of one rounding.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="this oracle needs torch (pip install 'twoends[oracle]')")

import torch.nn.functional as F  # noqa: E402

from tests.support.backends import all_ops  # noqa: E402
from tests.support.resident import f32_matrix  # noqa: E402
from twoends.checkpoint import mxfp4  # noqa: E402
from twoends.kernels.binary64 import binary64_ops  # noqa: E402
from twoends.kernels.ops import Matrix  # noqa: E402
from twoends.kernels.reference import elementary  # noqa: E402

EPS = 2.0**-24
EVERY_BACKEND = pytest.mark.parametrize("ops", all_ops(), ids=lambda ops: ops.backend)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide(values) -> torch.Tensor:
    """The same values as a binary64 tensor."""
    return torch.from_numpy(np.array(values, np.float64))


def relative_error(found: np.ndarray, wanted: torch.Tensor) -> float:
    """The largest, in roundings of binary32; no result may be zero."""
    truth = wanted.numpy()
    return float((np.abs(found - truth) / np.abs(truth)).max() / EPS)


def distance(found: np.ndarray, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest result."""
    return float(np.abs(found - wanted.numpy()).max() / np.abs(wanted.numpy()).max())


# In units in the last place of the true value. Tried on every argument from -32 to -1/64 and 1/64 to 4: the
# worst are exp 0.987, tanh 1.331, sigmoid 2.402 at -4.1572933 and softplus 2.797 at -2.7570076.
@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high", "bound"),
    [
        (elementary.exp, torch.exp, -104.5, 88.7, 1.0),
        (elementary.sigmoid, torch.sigmoid, -104.5, 104.5, 2.41),
        (elementary.tanh, torch.tanh, -12.0, 12.0, 1.5),
        (elementary.softplus, lambda x: F.softplus(x, threshold=1e9), -104.5, 104.5, 2.8),
        # a product on top of sigmoid, whose error may double in the product's unit
        (elementary.silu, F.silu, -80.0, 104.5, 2 * 2.41 + 0.5),
    ],
    ids=["exp", "sigmoid", "tanh", "softplus", "silu"],
)
def test_elementary_functions_are_as_near_as_stated(ours, theirs, low, high, bound) -> None:
    rng = np.random.default_rng(1)
    # Evenly spread values, where the worst lies, and values of every exponent down to the subnormals.
    spread = [rng.uniform(low, high, 50_000), rng.uniform(-8, 2, 200_000), [-4.1572933, -2.7570076]]
    tiny = np.ldexp(rng.uniform(1, 2, 50_000), rng.integers(-149, 6, 50_000)) * rng.choice([-1, 1], 50_000)
    x = np.concatenate([*spread, tiny[(tiny > low) & (tiny < high)]]).astype(np.float32)
    truth = theirs(wide(x)).numpy()
    unit = np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    assert float((np.abs(ours(x) - truth) / unit).max()) <= bound


@EVERY_BACKEND
def test_rms_norm_rounds_three_times(ops) -> None:
    x_TD, w_D = normal(2, 9, 1000), 1 + 0.1 * normal(3, 1000)
    x_TD[4] *= np.float32(1e-4)
    wanted = F.rms_norm(wide(x_TD), (1000,), wide(w_D), 1e-5)
    # inverse, times x, times w; 0.01 for the products of the three
    assert relative_error(ops.rms_norm(x_TD, w_D, 1e-5), wanted) <= 3.01


@EVERY_BACKEND
def test_l2_norm_adds_epsilon_to_the_sum(ops) -> None:
    x_THK = normal(4, 5, 3, 24)
    x_THK[2] *= np.float32(1e-4)
    x = wide(x_THK)
    wanted = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) * 24**-0.5
    # inverse, scale, and the two products
    assert relative_error(ops.l2_norm(x_THK, 24**-0.5), wanted) <= 4.01


@EVERY_BACKEND
def test_short_convolution_is_a_causal_depthwise_one_with_silu(ops) -> None:
    u_TP, w_P4, tail_3P = normal(5, 21, 40), normal(6, 40, 4), normal(7, 3, 40)
    history = torch.cat([wide(tail_3P), wide(u_TP)]).T[None]
    wanted = F.silu(F.conv1d(history, wide(w_P4)[:, None], groups=40))[0].T
    # Four taps that may cancel, then silu: some roundings of terms up to the size of the result (found: 1.2).
    assert distance(ops.short_conv(u_TP, w_P4, tail_3P), wanted) <= 4 * EPS
    assert np.array_equal(tail_3P, u_TP[-3:])


@EVERY_BACKEND
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decay_is_the_bounded_or_the_softplus_gate(ops, lower_bound) -> None:
    z_THK, dt_bias_HK, a_log_H = 4 * normal(8, 11, 3, 24), normal(9, 3, 24), normal(10, 3) / 2
    s, a = wide(z_THK) + wide(dt_bias_HK), wide(a_log_H).exp()[:, None]
    g = -a * F.softplus(s) if lower_bound is None else lower_bound * torch.sigmoid(a * s)
    found = ops.kda_decay(z_THK, dt_bias_HK, a_log_H, lower_bound)
    # An error of g is an error of exp(g) relative to it: |g| reaches 5, or about 40 with softplus, and has
    # some ten roundings itself. Alpha is at most 1, so this bounds it absolutely as well.
    assert np.abs(found - torch.exp(g).numpy()).max() <= 20 * EPS
    assert (found >= 0).all()
    assert (found <= 1).all()


def naive_recurrence(q, k, v, alpha, beta, state):
    """S = diag(alpha) S; S += k (beta (v - S^T k))^T; o = S^T q. State [H, K, V], changed in place."""
    outputs = []
    for t in range(len(q)):
        state *= alpha[t][..., None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state += k[t][..., None] * (beta[t][:, None] * error)[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def recurrence_inputs(num_tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    q, k, v = rng.standard_normal((3, num_tokens, 3, 24))
    unit = {"q_THK": q, "k_THK": k}
    inputs = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in unit.items()}
    inputs |= {"v_THV": v, "alpha_THK": np.exp(-5 * rng.random((num_tokens, 3, 24)) ** 4)}
    inputs |= {"beta_TH": rng.random((num_tokens, 3)), "state_HKV": rng.standard_normal((3, 24, 24))}
    return {name: x.astype(np.float32) for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("ops", "dtype", "bound"),
    # The state forgets, so errors don't pile up: sums over 24 keys, twice a token (found: 2.2 roundings).
    [(binary64_ops(), np.float64, 1e-14), *((ops, np.float32, 16 * EPS) for ops in all_ops())],
    ids=lambda value: getattr(value, "backend", ""),
)
def test_the_recurrence_is_the_delta_rule(ops, dtype, bound: float) -> None:
    inputs = {name: x.astype(dtype) for name, x in recurrence_inputs(150).items()}
    q, k, v, alpha, beta, state = (wide(x) for x in inputs.values())
    wanted = naive_recurrence(q, k, v, alpha, beta, state)
    assert distance(ops.kda_steps(**inputs), wanted) <= bound
    assert distance(inputs["state_HKV"], state) <= bound


@EVERY_BACKEND
def test_latent_attention_is_causal_attention_on_expanded_keys(ops) -> None:
    heads, nope, rope, value, latent, start, num_tokens = 3, 24, 8, 20, 36, 5, 7
    q_THQ = normal(12, num_tokens, heads, nope + rope)
    cache_CM = normal(13, start + num_tokens, latent + rope)
    kv_b = normal(14, heads * (nope + value), latent) / 6
    o_THV = np.full((num_tokens, heads, value), np.nan, np.float32)
    for head in range(heads):  # one panel per head
        rows = kv_b[head * (nope + value) :][: nope + value]
        ops.mla_heads(
            f32_matrix(rows), q_THQ=q_THQ, cache_CM=cache_CM, start=start, first_head=head, num_heads=1,
            scale=(nope + rope) ** -0.5, out_THV=o_THV,
        )  # fmt: skip
    expanded = (wide(cache_CM)[:, :latent] @ wide(kv_b).T).unflatten(1, (heads, nope + value))
    shared = wide(cache_CM)[:, None, latent:].expand(-1, heads, -1)
    k = torch.cat([expanded[..., :nope], shared], -1).transpose(0, 1)
    sees = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool).tril(start)
    wanted = F.scaled_dot_product_attention(
        wide(q_THQ).transpose(0, 1), k, expanded[..., nope:].transpose(0, 1), attn_mask=sees
    )
    # Scores reach 10, so their roundings act up to tenfold in exp (found: 2.1 roundings).
    assert distance(o_THV, wanted.transpose(0, 1)) <= 16 * EPS


@EVERY_BACKEND
def test_depth_mix_is_a_softmax_over_normalised_sources(ops) -> None:
    sources_NTD, f_D = normal(15, 4, 6, 104), normal(16, 104) / 5
    sources = wide(sources_NTD)
    scores = (F.rms_norm(sources, (104,), eps=1e-5) * wide(f_D)).sum(-1)
    wanted = torch.einsum("nt,ntd->td", torch.softmax(scores, 0), sources)
    assert distance(ops.attnres_mix(sources_NTD, f_D, 1e-5), wanted) <= 8 * EPS


@EVERY_BACKEND
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_glu_caps_all_but_the_sigmoid(ops, linear_beta) -> None:
    gate_TF, up_TF = 6 * normal(17, 40, 50), 30 * normal(18, 40, 50)
    gate, up = wide(gate_TF), wide(up_TF)
    capped_up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    wanted = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * capped_up
    # tanh twice at 1.5 units (three roundings), sigmoid at 2.41 (five), two quotients and four products
    assert relative_error(ops.situ_glu(gate_TF, up_TF, 4.0, linear_beta), wanted) <= 18.1


@EVERY_BACKEND
def test_swiglu_is_silu_times_up(ops) -> None:
    gate_TF, up_TF = 6 * normal(19, 40, 50), normal(20, 40, 50)
    wanted = F.silu(wide(gate_TF)) * wide(up_TF)
    # sigmoid at 2.41 units (up to five roundings), and two products
    assert relative_error(ops.silu_glu(gate_TF, up_TF), wanted) <= 7.1


@EVERY_BACKEND
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_router_chooses_as_a_stable_descending_sort(ops, renormalize: bool) -> None:
    """Half of the rows have ties on purpose: logits and biases from a few values."""
    logits_TE, bias_E = 2 * normal(21, 200, 40), normal(22, 40) / 10
    logits_TE[100:] = np.round(logits_TE[100:])
    bias_E[::2] = 0
    # The order is that of our own binary32 scores; torch sorts them, with a promise for ties.
    biased = torch.from_numpy(ops.sigmoid(logits_TE) + bias_E)
    ids_TS, weights_TS = ops.route(logits_TE, bias_E, 8, renormalize, 2.446)
    wanted_ids = torch.sort(biased, dim=1, descending=True, stable=True).indices[:, :8]
    assert ids_TS.tolist() == wanted_ids.tolist()
    scores = torch.sigmoid(wide(logits_TE)).gather(1, wanted_ids)
    wanted = scores / (scores.sum(1, keepdim=True) + 1e-20) if renormalize else scores
    # sigmoid at 2.41 units (up to five roundings) twice, seven additions, a quotient, scaling and its factor
    assert relative_error(weights_TS, wanted * 2.446) <= (20.1 if renormalize else 7.1)


@EVERY_BACKEND
def test_the_router_chooses_what_topk_chooses(ops) -> None:
    """Without ties, and with scores of torch's own: rows where two neighbours are too near are left out."""
    logits_TE, bias_E = 2 * normal(23, 300, 40), normal(24, 40) / 10
    biased = torch.sigmoid(wide(logits_TE)) + wide(bias_E)
    best = torch.topk(biased, 9, dim=1)
    clear = (best.values.diff(dim=1).abs().min(1).values > 1e-6).numpy()
    assert clear.mean() > 0.9
    ids_TS, _ = ops.route(logits_TE, bias_E, 8, True, 1.0)
    assert ids_TS[clear].tolist() == best.indices[:, :8].numpy()[clear].tolist()


def test_scale_bytes_are_torchs_e8m0() -> None:
    every = np.arange(256, dtype=np.uint8)
    # Code 2 is 1.0; each row is one group under one scale.
    found = mxfp4.decode(np.full((256, 16), 0x22, np.uint8), every[:, None])
    theirs = torch.from_numpy(every).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    assert np.array_equal(found, np.repeat(theirs[:, None], 32, axis=1), equal_nan=True)
    assert theirs[0] == 2.0**-127
    assert np.isnan(theirs[255])


def test_codes_are_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    found = mxfp4.decode(packed, np.full((16, 1), 127, np.uint8))
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(16, 32)
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(found.view(np.uint32), theirs.view(np.uint32))


@EVERY_BACKEND
def test_mxfp4_products_are_those_of_the_decoded_weights(ops) -> None:
    rng = np.random.default_rng(25)
    packed = rng.integers(0, 256, (40, 48), dtype=np.uint8)
    scale = rng.integers(110, 130, (40, 3), dtype=np.uint8)
    x_TX, found_TY = normal(26, 5, 96), np.full((5, 40), np.nan, np.float32)
    matrix = Matrix(format="mxfp4", rows=40, cols=96, data=packed.reshape(-1), scale=scale.reshape(-1))
    ops.matmul(matrix, x_TX, out_TY=found_TY, first_row=0)
    multiplier = torch.from_numpy(scale).view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
    table = wide([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.from_numpy(np.stack([packed & 15, packed >> 4], -1).reshape(40, 96)).int()
    weights, x = table[codes] * multiplier, wide(x_TX)
    # A term is rounded at most twice in its pair, once a group in its lane and four times in the reduction.
    assert (np.abs(found_TY - (x @ weights.T).numpy()) <= 9 * EPS * (x.abs() @ weights.abs().T).numpy()).all()
