"""The self-check at load: small stored results of every operation, compared bit for bit.

The inputs come from integer arithmetic and the expected results from `selfcheck.npy`, which
`python -m twoends.kernels.selfcheck` writes with the reference. It takes a few milliseconds and finds a
build that keeps the contract on the compiler's own terms (-ffast-math, contraction, flushed subnormals).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from twoends.errors import NotSound
from twoends.kernels.ops import F32, Format, Matrix, Ops
from twoends.kernels.pack_codec import pack_rows
from twoends.kernels.selfcheck_composed import composed_cases
from twoends.kernels.selfcheck_numbers import SPECIAL, Case, Numbers

_FILE = Path(__file__).with_name("selfcheck.npy")


def cases() -> Iterator[Case]:
    """(operation, what was put in, how to run it) in a fixed order."""
    numbers = Numbers()
    yield from _products(numbers)
    yield from _attention(numbers)
    yield from _rows(numbers)
    yield from _gates(numbers)
    yield from _packed(numbers)
    yield from composed_cases(numbers)


def _products(numbers: Numbers) -> Iterator[Case]:
    shapes: list[tuple[Format, int, int, int]] = [
        ("bf16", 11, 97, 1),
        ("bf16", 9, 64, 7),
        ("bf16", 210, 1000, 1),
        ("f32", 5, 70, 3),
        ("mxfp4", 11, 96, 1),
        ("mxfp4", 5, 160, 9),
    ]
    for form, rows, cols, inputs in shapes:
        matrix, x_TX = numbers.matrix(form, rows, cols), numbers.some(inputs, cols)
        x_TX[0, :4] = SPECIAL[:4]

        def run(ops: Ops, matrix: Matrix = matrix, x_TX: F32 = x_TX) -> list[np.ndarray]:
            out_TY = np.empty((x_TX.shape[0], matrix.rows), np.float32)
            ops.matmul(matrix, x_TX, out_TY=out_TY, first_row=0)
            return [out_TY]

        yield "matmul", f"{form} {rows} x {cols}, {inputs} input rows", run


def _attention(numbers: Numbers) -> Iterator[Case]:
    q, k, alpha = numbers.some(3, 2, 16), numbers.some(3, 2, 16), numbers.between(0.0, 1.0, 3, 2, 16)
    v, beta, state = numbers.some(3, 2, 40), numbers.between(0.0, 1.0, 3, 2), numbers.some(2, 16, 40)

    def kda(ops: Ops) -> list[np.ndarray]:
        after = state.copy()
        out = ops.kda_steps(q_THK=q, k_THK=k, v_THV=v, alpha_THK=alpha, beta_TH=beta, state_HKV=after)
        return [out, after]

    yield "kda_steps", "3 tokens, 2 heads of 16 x 40", kda
    kv_b, queries, cache = numbers.matrix("bf16", 26, 40), numbers.some(3, 2, 13), numbers.some(21, 48)

    def mla(ops: Ops) -> list[np.ndarray]:
        out = np.empty((3, 2, 8), np.float32)
        ops.mla_heads(
            kv_b, q_THQ=queries, cache_CM=cache, start=18, first_head=0, num_heads=2, scale=0.3, out_THV=out
        )
        return [out]

    yield "mla_heads", "3 rows after 18 positions, 2 heads, latent 40 + 8", mla


def _rows(numbers: Numbers) -> Iterator[Case]:
    x, w, gate, w4 = numbers.some(2, 3, 37), numbers.some(37), numbers.special(2, 3, 37), numbers.some(37, 4)
    u, tail, a_log = numbers.some(2, 37), numbers.some(3, 37), numbers.some(3)
    dt = numbers.some(3, 37)

    def conv(ops: Ops) -> list[np.ndarray]:
        after = tail.copy()
        return [ops.short_conv(u, w4, after), after]

    yield "rms_norm", "6 rows of 37", lambda ops: [ops.rms_norm(x, w, 1e-5)]
    yield "l2_norm", "6 rows of 37", lambda ops: [ops.l2_norm(x, 0.3)]
    yield "gated_head_norm", "6 rows of 37", lambda ops: [ops.gated_head_norm(x, w, gate, 1e-5)]
    yield "short_conv", "2 tokens, 37 channels", conv
    yield "kda_decay", "bounded, 2 x 3 x 37", lambda ops: [ops.kda_decay(x * 9, dt, a_log, -5.0)]
    yield "kda_decay", "softplus, 2 x 3 x 37", lambda ops: [ops.kda_decay(x * 9, dt, a_log, None)]
    yield (
        "attnres_mix",
        "3 sources, 2 rows of 37",
        lambda ops: [ops.attnres_mix(x.reshape(3, 2, 37), w, 1e-5)],
    )
    yield "combine", "2 rows, 3 ranks of 37", lambda ops: [ops.combine(x, a_log[None].repeat(2, axis=0))]


def _gates(numbers: Numbers) -> Iterator[Case]:
    gate, up = numbers.special(5, 37), numbers.special(5, 37)[::-1].copy()
    logits, bias = numbers.some(3, 50), numbers.some(50)
    logits[0, 20:30] = 0.5
    bias[20:30] = 0.25

    yield "sigmoid", "special values", lambda ops: [ops.sigmoid(gate)]
    yield "sigmoid_gate", "special values", lambda ops: [ops.sigmoid_gate(up, gate)]
    yield "silu_glu", "special values", lambda ops: [ops.silu_glu(gate, up)]
    yield "situ_glu", "beta 4", lambda ops: [ops.situ_glu(gate, up, 4.0, None)]
    yield "situ_glu", "beta 4, linear beta 25", lambda ops: [ops.situ_glu(gate, up, 4.0, 25.0)]
    yield "route", "3 rows, 6 of 50, ties", lambda ops: list(ops.route(logits, bias, 6, True, 2.5))
    yield "route", "not renormalised", lambda ops: list(ops.route(logits, bias, 6, False, 2.5))


def _packed(numbers: Numbers) -> Iterator[Case]:
    """Rows of narrow exponents (3-bit codes) and of wide ones (4-bit), escapes, ragged ends, many inputs."""
    for rows, cols, inputs, spread in ((21, 1234, 1, 1.0), (21, 160, 9, 1.0), (9, 700, 2, 30.0)):
        w = numbers.some(rows, cols) * np.float32(2) ** -numbers.between(0.0, spread, rows, 1).round()
        w[0, : SPECIAL.size] = SPECIAL
        data = pack_rows((w.view(np.uint32) >> 16).astype(np.uint16))
        assert data is not None, "these rows shrink"
        matrix = Matrix(format="packed", rows=rows, cols=cols, data=data)
        x_TX = numbers.some(inputs, cols)

        def run(ops: Ops, matrix: Matrix = matrix, x_TX: F32 = x_TX) -> list[np.ndarray]:
            out_TY = np.empty((x_TX.shape[0], matrix.rows), np.float32)
            ops.matmul(matrix, x_TX, out_TY=out_TY, first_row=0)
            return [out_TY]

        yield "matmul", f"packed {rows} x {cols}, {inputs} input rows", run


def results(ops: Ops) -> np.ndarray:
    """Every case's results one after another, as float32 (expert ids are small and exact)."""
    with np.errstate(all="ignore"):
        return np.concatenate([_flat(run(ops)) for _, _, run in cases()])


def _flat(arrays: list[np.ndarray]) -> F32:
    return np.concatenate([a.reshape(-1).astype(np.float32) for a in arrays])


def stored_vectors() -> F32:
    """The reference's results, as the package carries them."""
    return np.asarray(np.load(_FILE))


def check(ops: Ops, *, vectors: F32, built_by: str) -> None:
    """Raises NotSound at the first result of `ops` that differs from `vectors` in a bit."""
    start = 0
    for name, case, run in cases():
        with np.errstate(all="ignore"):
            got = _flat(run(ops))
        expected = vectors[start : start + got.size]
        start += got.size
        differs = (got.view(np.int32) != expected.view(np.int32)) & ~(np.isnan(got) & np.isnan(expected))
        if differs.any():
            index = int(np.argmax(differs))
            place = f"{case}, element {index}"
            raise _difference(name, place, got[index], expected[index], built_by)
    assert start == vectors.size, f"selfcheck.npy holds {vectors.size} numbers, the cases give {start}"


def _difference(name: str, place: str, got: np.float32, expected: np.float32, built_by: str) -> NotSound:
    return NotSound(
        f"the native '{name}' differs from the reference, so runs would not be reproducible.",
        evidence=[
            ("case", place),
            ("native", short_hex(got)),
            ("reference", short_hex(expected), _distance(got, expected)),
            ("built by", *built_by.split(", ", 1)),
        ],
        remedies=[
            "A compiler that reorders, fuses or flushes does this; the order is part of the contract",
            "(docs/contracts.md).",
            "Rebuild with the project's flags:   make native",
            "Or run slower and right:            twoends run MODEL --kernels reference",
        ],
    )


def short_hex(x: np.float32) -> str:
    """A binary32 number in hexadecimal without the digits that binary64 would add."""
    text = float(x).hex()
    if "p" not in text:
        return text
    digits, exponent = text.split("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}"


def _distance(got: np.float32, expected: np.float32) -> str:
    if not (np.isfinite(got) and np.isfinite(expected)):
        return ""
    steps = abs(_ordered(got) - _ordered(expected))
    return "one unit in the last place" if steps == 1 else f"{steps} units in the last place"


def _ordered(x: np.float32) -> int:
    """Consecutive integers for consecutive binary32 numbers."""
    bits = int(x.view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


if __name__ == "__main__":
    from twoends.kernels.reference import reference_ops

    np.save(_FILE, results(reference_ops()))
