"""Cases of the self-check for the operations that are compositions of others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twoends.kernels.ops import Activations, ExpertWeights, Glu, KdaInputs, KdaState, Ops
from twoends.kernels.selfcheck_numbers import Case, Numbers


def composed_cases(numbers: Numbers) -> Iterator[Case]:
    """(operation, what was put in, how to run it) in a fixed order."""
    yield from _products(numbers)
    for bound in (-5.0, None):
        yield _kda(numbers, bound)
    for glu in (
        Glu(beta=4.0, linear_beta=25.0),
        Glu(beta=4.0, linear_beta=None),
        Glu(beta=None, linear_beta=None),
    ):
        yield _experts(numbers, glu, "f32")
    yield _experts(numbers, Glu(beta=4.0, linear_beta=25.0), "mxfp8")
    yield _mxfp8(numbers)


def _products(numbers: Numbers) -> Iterator[Case]:
    """Panels of one matrix and matrices of other formats, small and beyond what one thread keeps."""
    for rows, cols, inputs in ((5, 97, 2), (300, 700, 1)):
        matrices = [
            numbers.matrix("bf16", rows, cols),
            numbers.matrix("bf16", 3, cols),
            numbers.matrix("f32", 9, cols),
        ]
        x_TX = numbers.some(inputs, cols)

        def run(ops: Ops, matrices=matrices, x_TX=x_TX) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
            one_TY = np.empty((x_TX.shape[0], matrices[0].rows + 3), np.float32)
            two_TY = np.empty((x_TX.shape[0], 9), np.float32)
            last = matrices[0].rows
            ops.products(
                x_TX, [(matrices[0], one_TY, 0), (matrices[1], one_TY, last), (matrices[2], two_TY, 0)]
            )
            return [one_TY, two_TY]

        yield "products", f"bf16 {rows} x {cols} in two panels and f32, {inputs} input rows", run


def _kda(numbers: Numbers, bound: float | None) -> Case:
    tokens, heads, dim = 3, 2, 20
    width = heads * dim
    inputs = KdaInputs(
        q_TP=numbers.some(tokens, width),
        k_TP=numbers.some(tokens, width),
        v_TP=numbers.some(tokens, width),
        decay_THK=numbers.some(tokens, heads, dim),
        beta_TH=numbers.some(tokens, heads),
        gate_THV=numbers.some(tokens, heads, dim),
        q_conv_P4=numbers.some(width, 4),
        k_conv_P4=numbers.some(width, 4),
        v_conv_P4=numbers.some(width, 4),
        dt_bias_HK=numbers.some(heads, dim),
        a_log_H=numbers.some(heads),
        o_norm_V=numbers.some(dim),
        lower_bound=bound,
        eps=1e-5,
    )
    state_HKV, tails = numbers.some(heads, dim, dim), numbers.some(3, 3, width)

    def run(ops: Ops) -> list[np.ndarray]:
        q_tail_3P, k_tail_3P, v_tail_3P = tails.copy()
        state = KdaState(
            state_HKV=state_HKV.copy(), q_tail_3P=q_tail_3P, k_tail_3P=k_tail_3P, v_tail_3P=v_tail_3P
        )
        out = ops.kda_mix(inputs, state)
        after = [state.state_HKV, q_tail_3P, k_tail_3P, v_tail_3P]
        return [out.y_THV, out.k_THK, out.v_THV, out.alpha_THK, out.beta_TH, *after]

    return "kda_mix", f"3 tokens, 2 heads of 20, bound {bound}", run


def _mxfp8(numbers: Numbers) -> Case:
    """Blocks of zeros, of values at steps, of subnormals, of huge values, with infinity."""
    x = numbers.special(9, 64)
    x[1] = 0
    x[2] *= np.float32(1e-38)
    x[3] *= np.float32(1e37)
    x[4, 7] = np.inf
    x[5, :3] = (448, np.nextafter(np.float32(448), np.float32(500)), -17)
    x[6, :3] = (447.9, 2.0**-10, -(2.0**-11))
    x[7, :3] = (1.75, 1.0625, 1.1875)
    return "mxfp8", "9 rows of 64, special values", lambda ops: [ops.mxfp8(x)]


def _experts(numbers: Numbers, glu: Glu, activations: Activations) -> Case:
    """Experts with no place, one and several; two groups, in another order than that of their ids."""
    weights = [
        ExpertWeights(
            w1=numbers.matrix("mxfp4", 32, 64),
            w3=numbers.matrix("mxfp4", 32, 64),
            w2=numbers.matrix("mxfp4", 64, 32),
        )
        for _ in range(4)
    ]
    for expert in weights:
        for matrix in (expert.w1, expert.w2, expert.w3):
            assert matrix.scale is not None
            # Sums without infinities, so that a difference can't hide behind a NaN.
            matrix.scale[:4] = 121
    z_TZ = numbers.some(3, 64)
    ids_TS = np.array([[2, 0], [0, 3], [2, 3]], np.int32)

    def run(ops: Ops) -> list[np.ndarray]:
        out_TSZ = np.full((3, 2, 64), np.nan, np.float32)
        for group in ((3, 1), (0, 2)):
            chosen = [(i, weights[i]) for i in group]
            ops.expert_mlps(chosen, z_TZ, ids_TS, glu, activations=activations, out_TSZ=out_TSZ)
        return [out_TSZ]

    return "expert_mlps", f"3 rows, 4 experts, {activations}, beta {glu.beta}, {glu.linear_beta}", run
