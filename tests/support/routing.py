"""Routing traces of several kinds, made from a seed: what a real router may do, and what it may not."""

from __future__ import annotations

import numpy as np

from twoends.bench.traces import RoutingTrace, Step

KINDS = ("flat", "local", "skewed", "local and skewed", "drifting", "topics", "two texts", "no reuse")


def synthetic_trace(
    kind: str, *, seed=0, tokens=120, layers=12, experts=64, chosen=6, ranked=True
) -> RoutingTrace:
    """Scores per layer that move from token to token as `kind` says; the largest are chosen, best first."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    scores_NLE = _scores(kind, rng, (tokens, layers, experts), chosen)
    ids_NLS = np.argsort(-scores_NLE, axis=2, kind="stable")[..., :chosen].astype(np.int32)
    if not ranked:
        ids_NLS = np.sort(ids_NLS, axis=2)
    steps = tuple(
        Step(layer=layer + 1, ids_TS=ids_LS[layer][None]) for ids_LS in ids_NLS for layer in range(layers)
    )
    return RoutingTrace(form=f"synthetic, {kind}", steps=steps, ranked=ranked, fingerprint=None)


def _scores(kind: str, rng: np.random.Generator, shape: tuple[int, int, int], chosen: int) -> np.ndarray:
    tokens, layers, experts = shape
    noise = rng.gumbel(size=shape)
    match kind:
        case "flat":
            return noise
        case "local":
            return _walk(rng, shape, stay=0.8) * 2 + 0.5 * noise
        case "skewed":
            return noise + _popularity(rng, (layers, experts), power=1.2)
        case "local and skewed":
            return _walk(rng, shape, stay=0.7) * 1.5 + 0.5 * noise + _popularity(rng, (layers, experts), 0.7)
        case "drifting":
            return _walk(rng, shape, stay=0.98) * 3 + noise
        case "topics":
            topic_KLE = rng.normal(size=(4, layers, experts)) * 2
            return topic_KLE[np.arange(tokens) // 25 % 4] + noise
        case "two texts":
            topic_KLE = rng.normal(size=(2, layers, experts)) * 3
            return topic_KLE[np.arange(tokens) % 2] + noise
        case "no reuse":
            # Every expert has its turn before any comes again.
            first = np.arange(tokens)[:, None] * chosen % experts
            turn = (np.arange(experts)[None] - first) % experts
            return np.broadcast_to(-turn[:, None, :].astype(float), shape)
    raise ValueError(kind)


def _walk(rng: np.random.Generator, shape: tuple[int, int, int], *, stay: float) -> np.ndarray:
    """Standard normal scores of which a share `stay` (as a correlation) lives on to the next token."""
    steps = rng.normal(size=shape)
    for token in range(1, shape[0]):
        steps[token] = stay * steps[token - 1] + np.sqrt(1 - stay**2) * steps[token]
    return steps


def _popularity(rng: np.random.Generator, shape: tuple[int, int], power: float) -> np.ndarray:
    """Logarithms of Zipf's weights, in another order in every layer."""
    order = np.argsort(rng.random(shape), axis=1)
    return -power * np.log1p(order)
