"""What one sequence carries from token to token: recurrent matrices, convolution tails, latent cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.kernels.ops import F32, KdaState


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaState:
    """Room for `cache_CM` rows of (normalised latent, shared key); rows not yet written are NaN."""

    cache_CM: F32


class SequenceState:
    """The state of one sequence: `layers[i]` and the number of tokens that have gone through."""

    def __init__(self, config: ModelConfig, capacity: int, *, dtype: type[np.floating] = np.float32) -> None:
        """Room for `capacity` tokens; every byte is touched now, so memory can't grow later.

        `dtype` is binary32 in the engine; the binary64 oracle of the tests asks for its own.
        """
        self.capacity = capacity
        self.position = 0
        self.layers: tuple[KdaState | MlaState, ...] = tuple(
            _mla_state(config, capacity, dtype) if config.is_mla(i) else _kda_state(config, dtype)
            for i in range(config.num_layers)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the whole state, the room for later tokens included."""
        return sum(array.nbytes for layer in self.layers for array in _arrays_of(layer))

    def reset(self) -> None:
        """Begins anew, in the same memory; nothing of what went through stays."""
        for layer in self.layers:
            if isinstance(layer, MlaState):
                layer.cache_CM[: self.position] = np.nan
            else:
                for array in _arrays_of(layer):
                    array.fill(0.0)
        self.position = 0

    def arrays(self) -> Iterator[tuple[str, F32]]:
        """(name, the part in use) of everything that must be saved, in a fixed order."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer, MlaState):
                yield f"{i}.cache", layer.cache_CM[: self.position]
            else:
                yield f"{i}.state", layer.state_HKV
                yield f"{i}.q_tail", layer.q_tail_3P
                yield f"{i}.k_tail", layer.k_tail_3P
                yield f"{i}.v_tail", layer.v_tail_3P


def recurrent_bytes(config: ModelConfig) -> int:
    """Bytes of the KDA layers' matrices and tails of one sequence."""
    layers = config.num_layers - len(config.mla_layers)
    matrices = config.kda_num_heads * config.kda_head_dim**2
    return 4 * layers * (matrices + 3 * (config.conv_width - 1) * config.kda_width)


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of latent cache that one token needs over all MLA layers."""
    return 4 * len(config.mla_layers) * config.latent_row


def _arrays_of(layer: KdaState | MlaState) -> tuple[F32, ...]:
    if isinstance(layer, MlaState):
        return (layer.cache_CM,)
    return (layer.state_HKV, layer.q_tail_3P, layer.k_tail_3P, layer.v_tail_3P)


def _kda_state(config: ModelConfig, dtype: type[np.floating]) -> KdaState:
    heads, dim = config.kda_num_heads, config.kda_head_dim
    tail_shape = (config.conv_width - 1, config.kda_width)
    return KdaState(
        state_HKV=_filled((heads, dim, dim), 0.0, dtype),
        q_tail_3P=_filled(tail_shape, 0.0, dtype),
        k_tail_3P=_filled(tail_shape, 0.0, dtype),
        v_tail_3P=_filled(tail_shape, 0.0, dtype),
    )


def _mla_state(config: ModelConfig, capacity: int, dtype: type[np.floating]) -> MlaState:
    return MlaState(cache_CM=_filled((capacity, config.latent_row), np.nan, dtype))


def _filled(shape: tuple[int, ...], value: float, dtype: type[np.floating]) -> F32:
    # np.full writes every page; np.zeros would only promise them.
    return np.full(shape, value, dtype)
