"""Ops: the record of every operation a backend supplies. docs/contracts.md defines their bits.

A backend is `reference` (numpy, the definition) or `native` (C++, equal to it bit for bit).
All arrays are numpy float32, C-contiguous, unless an entry says otherwise; outputs are new
arrays unless the entry names an `out` or a state that it changes in place. No operation
depends on the number of rows T in a call: row t of the result is a function of row t alone
(and of the rows before it, for the three operations that carry a sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]

Format = Literal["bf16", "f32", "mxfp4", "packed"]
# What the routed experts' products take in: the values as they are, or rounded to MXFP8.
Activations = Literal["f32", "mxfp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Whole rows of one weight matrix, as the bytes of the checkpoint or of a pack of it.

    `data` is one-dimensional uint8, contiguous, of any alignment: rows * cols * 2 bytes (bf16),
    * 4 (f32), or rows * cols / 2 (mxfp4, low nibble = even column). `scale` is uint8 of
    rows * cols / 32 for mxfp4, or fewer as pack_scales.py lays them out, and None otherwise. mxfp4
    needs cols to be a multiple of 32.
    packed: one block of bf16 rows as pack_codec.py lays it out; it stands for exactly those bf16 values.
    """

    format: Format
    rows: int
    cols: int
    data: Bytes
    scale: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One routed expert: w2(glu(w1 z, w3 z))."""

    w1: Matrix
    w2: Matrix
    w3: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """A gated unit: SiTU with its caps, or SiLU where `beta` is None."""

    beta: float | None
    linear_beta: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaInputs:
    """What the projections of a KDA layer gave, before the convolutions, and the small weights."""

    q_TP: F32
    k_TP: F32
    v_TP: F32
    decay_THK: F32
    beta_TH: F32
    gate_THV: F32
    q_conv_P4: F32
    k_conv_P4: F32
    v_conv_P4: F32
    dt_bias_HK: F32
    a_log_H: F32
    o_norm_V: F32
    lower_bound: float | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaState:
    """`state_HKV` and the last inputs of the three convolutions, oldest first; zeros before the start."""

    state_HKV: F32
    q_tail_3P: F32
    k_tail_3P: F32
    v_tail_3P: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaOutput:
    """The gated output of a KDA layer, and what its recurrence read."""

    y_THV: F32
    k_THK: F32
    v_THV: F32
    alpha_THK: F32
    beta_TH: F32


class Matmul(Protocol):
    """out_TY[t, first_row + r] = dot(matrix[r], x_TX[t]) for every row; changes `out_TY` in place."""

    def __call__(self, matrix: Matrix, x_TX: F32, *, out_TY: F32, first_row: int) -> None: ...


class Products(Protocol):
    """`matmul` of one input with several matrices: (matrix, its out_TY, its first_row) each."""

    def __call__(self, x_TX: F32, parts: Sequence[tuple[Matrix, F32, int]]) -> None: ...


class ExpertMlps(Protocol):
    """out_TSZ[t, s] = w2(glu(w1 z, w3 z)) with z = z_TZ[t], wherever ids_TS[t, s] is one of `experts`.

    With `activations` mxfp8 every product's input is rounded first, as `mxfp8` does it.
    """

    def __call__(
        self,
        experts: Sequence[tuple[int, ExpertWeights]],
        z_TZ: F32,
        ids_TS: I32,
        glu: Glu,
        *,
        activations: Activations = "f32",
        out_TSZ: F32,
    ) -> None: ...


class KdaSteps(Protocol):
    """The recurrence over T tokens in order; changes `state_HKV`; gives o_THV."""

    def __call__(
        self, *, q_THK: F32, k_THK: F32, v_THV: F32, alpha_THK: F32, beta_TH: F32, state_HKV: F32
    ) -> F32: ...


class MlaHeads(Protocol):
    """Latent attention of `num_heads` heads; `kv_b` has their rows (nope rows, then value rows, per head).

    `q_THQ` holds all heads; heads first_head .. first_head + num_heads - 1 are used, and the same
    heads of `out_THV` are written. `cache_CM` has the rows of every position so far, this call's T
    included (C = start + T): row t sees positions 0 .. start + t.
    """

    def __call__(
        self,
        kv_b: Matrix,
        *,
        q_THQ: F32,
        cache_CM: F32,
        start: int,
        first_head: int,
        num_heads: int,
        scale: float,
        out_THV: F32,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """What a backend supplies. Fields marked "rows" treat each row alone.

    The last three are compositions of the others (kernels/composed.py is their definition): a backend
    may do each in one call, in any order of work that leaves the bits as they are.
    """

    backend: str
    # matrix products, rows
    matmul: Matmul
    # (x_TD, w_D, eps) -> y_TD, rows
    rms_norm: Callable[[F32, F32, float], F32]
    # (u_TP, w_P4, tail_3P in place) -> y_TP; depthwise, causal, SiLU fused
    short_conv: Callable[[F32, F32, F32], F32]
    # (x_THK, scale) -> x / sqrt(sum x^2 + 1e-6) * scale, rows
    l2_norm: Callable[[F32, float], F32]
    # (z_THK, dt_bias_HK, a_log_H, lower_bound or None) -> alpha_THK, rows
    kda_decay: Callable[[F32, F32, F32, float | None], F32]
    # (x) -> sigmoid(x), any shape
    sigmoid: Callable[[F32], F32]
    kda_steps: KdaSteps
    # (o_THV, w_V, gate_THV, eps) -> rms_norm(o) * sigmoid(gate), rows
    gated_head_norm: Callable[[F32, F32, F32, float], F32]
    mla_heads: MlaHeads
    # (o_TP, gate_TP) -> o * sigmoid(gate), rows
    sigmoid_gate: Callable[[F32, F32], F32]
    # (sources_NTD, f_D, eps) -> h_TD, rows
    attnres_mix: Callable[[F32, F32, float], F32]
    # (logits_TE, bias_E, num_chosen, renormalize, scaling) -> ids_TS int32, weights_TS; rows
    route: Callable[[F32, F32, int, bool, float], tuple[I32, F32]]
    # (gate_TF, up_TF, beta, linear_beta or None) -> y_TF, rows
    situ_glu: Callable[[F32, F32, float, float | None], F32]
    # (gate_TF, up_TF) -> y_TF, rows
    silu_glu: Callable[[F32, F32], F32]
    # (x) -> x rounded to E4M3 with a power of two for each 32 of the last axis, whole blocks; rows
    mxfp8: Callable[[F32], F32]
    # (y_TSZ, weights_TS) -> z_TZ, summed in rank order, rows
    combine: Callable[[F32, F32], F32]
    products: Products
    # (inputs, state in place) -> output: convolutions, norms, decay, recurrence, gated norm of one sequence
    kda_mix: Callable[[KdaInputs, KdaState], KdaOutput]
    expert_mlps: ExpertMlps
