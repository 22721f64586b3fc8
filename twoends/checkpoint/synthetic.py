"""Synthetic weights that behave like trained ones; a function of (seed, tensor name) alone.

Matrices are Gaussian per row with a spread of row scales, sized so that every sub-layer adds about
the same to the residual stream and logits have a standard deviation near 2. The embedding has a
common part, and router rows lean on it unequally: routing is neither uniform nor collapsed, and
successive tokens share experts. MXFP4 experts are drawn as codes and scale bytes with the
frequencies counted in 7,168 released blocks (layer 1, expert 0, w1), not by encoding Gaussians.
Generator: numpy's PCG64, seeded by BLAKE2b of seed and name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint import names
from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.layout import TensorPlan

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_PIECE_VALUES = 1 << 20
# Shares of the eight E2M1 magnitudes and of the scale byte against its usual value, as released.
_MAGNITUDE_SHARES = (0.1159, 0.2212, 0.1917, 0.1526, 0.1531, 0.1047, 0.0506, 0.0103)
_SCALE_STEPS = {-1: 0.154, 0: 0.841, 1: 0.005}
# Root mean square of a code's value under those shares.
_CODE_RMS = 1.823
_ROW_SPREAD = 0.2
# How much the rows of a matrix lean on the embedding's common direction. In the router this makes
# some experts likelier for every token; in queries and keys of KDA it makes the state's answer a
# moving average of recent tokens, so that what is chosen for one token is likelier for the next.
_LEANS = {"router": 1.4, "q_proj": 4.0, "k_proj": 4.0}
# How strongly a matrix speaks, as a multiple of the gain that keeps the scale of its input.
_MATRIX_GAINS = {"lm_head": 2.0, "shared_down": 0.6, "latent_up": 0.4}


class SyntheticWeights:
    """Gives any tensor of one model in pieces of about a million values."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._shorts = {spec.file_name: spec.short for spec in names.top_specs(config)}
        for layer in range(config.num_layers):
            self._shorts |= {spec.file_name: spec.short for spec in names.layer_specs(config, layer)}
        self._pattern = names.expert_pattern(config)
        self._code_pairs = _code_pair_table()
        self._scale_steps = _scale_step_table()

    def pieces(self, plan: TensorPlan) -> Iterator[NDArray[Any]]:
        """The bytes of one tensor, in file order."""
        rng = np.random.Generator(np.random.PCG64(self._key(plan.name)))
        match = self._pattern.fullmatch(plan.name)
        if match is not None and match.group(4) == "weight_packed":
            return self._codes(plan, rng)
        if match is not None and match.group(4) == "weight_scale":
            cols = plan.shape[1] * 32
            return iter([self._scales(plan, cols**-0.5, rng)])
        if match is not None:
            return self._matrix(plan, rng, std=plan.shape[1] ** -0.5)
        short = self._shorts[plan.name]
        if len(plan.shape) == 2 and plan.shape[0] > 1:
            return self._named_matrix(short, plan, rng)
        values = self._vector(short, plan.shape, rng).astype(np.float32)
        return iter([values if plan.dtype == "F32" else to_bf16(values)])

    def _key(self, name: str) -> int:
        text = f"{self._seed}\n{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")

    def _common(self, width: int) -> F32:
        """The direction that all embedding rows share."""
        rng = np.random.Generator(np.random.PCG64(self._key("common direction")))
        return rng.standard_normal(width, dtype=np.float32)

    def _named_matrix(self, short: str, plan: TensorPlan, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
        cols = plan.shape[1]
        if short == "embed":
            return self._matrix(plan, rng, std=0.4, common=0.3 * self._common(cols))
        if short == "lm_head":
            return self._head(plan, rng)
        if short in _LEANS:
            lean = rng.standard_normal((plan.shape[0], 1), dtype=np.float32) * (_LEANS[short] / cols)
            return self._matrix(plan, rng, std=1.0 / cols**0.5, lean=lean)
        return self._matrix(plan, rng, std=_MATRIX_GAINS.get(short, 1.0) / cols**0.5)

    def _head(self, plan: TensorPlan, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
        """Rows that answer neither to the common direction nor to their own token, so no endless repeats."""
        cols = plan.shape[1]
        common = self._common(cols)
        common /= np.sqrt((common * common).sum())
        embed = next(spec for spec in names.top_specs(self._config) if spec.short == "embed")
        own_plan = TensorPlan(name=embed.file_name, dtype="F32", shape=embed.shape)
        plain = TensorPlan(name=plan.name, dtype="F32", shape=plan.shape)
        pieces = self._matrix(plain, rng, std=_MATRIX_GAINS["lm_head"] / cols**0.5)
        for values, own in zip(pieces, self.pieces(own_plan), strict=True):
            own -= (own @ common)[:, None] * common
            own /= np.sqrt((own * own).sum(axis=1, keepdims=True))
            values -= (values @ common)[:, None] * common
            values -= own * (8.0 / cols**0.5)
            yield values if plan.dtype == "F32" else to_bf16(values)

    def _matrix(
        self,
        plan: TensorPlan,
        rng: np.random.Generator,
        *,
        std: float,
        common: F32 | None = None,
        lean: F32 | None = None,
    ) -> Iterator[NDArray[Any]]:
        """Gaussian rows with a spread of scales; `common` is added to each, `lean` times it to its row."""
        rows, cols = plan.shape
        scale = std * np.exp(_ROW_SPREAD * rng.standard_normal((rows, 1), dtype=np.float32))
        step = max(1, _PIECE_VALUES // cols)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            values = rng.standard_normal((last - first, cols), dtype=np.float32)
            values *= scale[first:last]
            if common is not None:
                values += common
            if lean is not None:
                values += lean[first:last] * self._common(cols)
            yield values if plan.dtype == "F32" else to_bf16(values)

    def _vector(self, short: str, shape: tuple[int, ...], rng: np.random.Generator) -> F64:
        """Norm weights, gates, convolutions and biases, each as trained ones look."""
        noise: F64 = rng.standard_normal(shape)
        if short.endswith("_norm"):
            return 1 + 0.1 * noise
        if short == "a_log":
            # Mean and spread of a released layer; entries past the heads are padding, exactly zero.
            noise = np.clip(0.29 + 0.33 * noise, -0.5, 1.1).reshape(-1)
            noise[self._config.kda_num_heads :] = 0
            return noise.reshape(shape)
        if short == "dt_bias":
            return self._dt_bias(noise, rng)
        if short.endswith("_conv"):
            taps: F64 = 0.25 * noise + (np.arange(shape[-1]) == shape[-1] - 1)
            return taps
        if short == "router_bias":
            noise -= noise.mean()
            return noise * 0.03
        if short.endswith("_res_proj"):
            noise *= 0.7 / shape[-1] ** 0.5
            return noise
        raise KeyError(f"no rule for the values of '{short}'")

    def _dt_bias(self, noise: F64, rng: np.random.Generator) -> F64:
        """Time constants from one token to a hundred or more."""
        if self._config.gate_lower_bound is not None:
            return -2.5 + 1.5 * noise
        decay: F64 = np.exp(rng.uniform(np.log(1e-2), np.log(1.0), noise.shape))
        return np.log(np.expm1(decay))

    def _codes(self, plan: TensorPlan, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
        left = plan.nbytes
        while left:
            count = min(left, 4 * _PIECE_VALUES)
            yield self._code_pairs[_random_words(rng, count)]
            left -= count

    def _scales(self, plan: TensorPlan, std: float, rng: np.random.Generator) -> NDArray[np.uint8]:
        rows, groups = plan.shape
        wanted = 127 + np.log2(std / _CODE_RMS) + _ROW_SPREAD * rng.standard_normal((rows, 1))
        base = np.floor(wanted + rng.random((rows, 1))).astype(np.int16)
        steps = self._scale_steps[_random_words(rng, rows * groups)].reshape(rows, groups)
        scales: NDArray[np.uint8] = np.clip(base + steps, 1, 252).astype(np.uint8)
        return scales


def to_bf16(values: F32) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as 16-bit words. Values must be finite."""
    words = np.ascontiguousarray(values).view(np.uint32)
    return ((words + (0x7FFF + ((words >> 16) & 1))) >> 16).astype(np.uint16)


def _random_words(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """`count` random 16-bit words, straight from the generator."""
    raw = rng.bit_generator.random_raw(-(-count // 4))
    words: NDArray[np.uint16] = raw.astype("<u8", copy=False).view("<u2")[:count]
    return words


def _code_pair_table() -> NDArray[np.uint8]:
    """Packed byte for each of 65,536 equally likely words, so that codes have the released shares."""
    shares = np.array(_MAGNITUDE_SHARES + _MAGNITUDE_SHARES)
    return _table(np.arange(256), np.outer(shares, shares).reshape(-1)).astype(np.uint8)


def _scale_step_table() -> NDArray[np.int16]:
    return _table(np.array(list(_SCALE_STEPS)), np.array(list(_SCALE_STEPS.values()))).astype(np.int16)


def _table(outcomes: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    edges = np.rint(np.cumsum(shares / shares.sum()) * 65536).astype(np.int64)
    return np.repeat(outcomes, np.diff(edges, prepend=0))
