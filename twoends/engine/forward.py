"""One pass: token ids in, logits out; bytes arrive as they are needed. The file to read first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twoends.checkpoint.config import ModelConfig
from twoends.engine.store import WeightStore
from twoends.kernels.ops import F32, I32, Ops
from twoends.model.attnres import Residual
from twoends.model.layer import attention_half, head_logits, mixture_half
from twoends.model.state import SequenceState
from twoends.model.tentative import Tentative

# Called with the number of layers done, after each.
LayerDone = Callable[[int], None]


def forward(
    ids_T: I32,
    *,
    config: ModelConfig,
    store: WeightStore,
    state: SequenceState,
    ops: Ops,
    layer_done: LayerDone,
    last_only: bool = True,
    tentative: Tentative | None = None,
) -> F32:
    """Logits of the last token (or of all), [1 or T, W]; `state` moves on by T tokens.

    In a `tentative` pass the state stays, until `tentative.keep` moves it on. Every weight is read
    once, whatever T is. Raises ReadError, and NotSound from the router.
    """
    residual = Residual(store.embedding_rows(ids_T), config)
    for i in range(config.num_layers):
        with store.layer(i) as weights:  # layer i is arriving; what follows is already on its way
            attention_half(weights, residual, state, layer=i, config=config, ops=ops, tentative=tentative)
            experts = store.experts(i) if config.is_moe(i) else None
            mixture_half(weights, experts, residual, config=config, ops=ops)
        layer_done(i + 1)
    if tentative is None:
        state.position += len(ids_T)
    with store.top() as top:
        h_TD = residual.input(top, "output_res", ops)
        if last_only:
            h_TD = np.ascontiguousarray(h_TD[-1:])
        return head_logits(top, h_TD, config, ops)
