"""One pass: token ids in, logits out; bytes arrive as they are needed. The file to read first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twoends.checkpoint.config import ModelConfig
from twoends.engine.lookahead import LookAhead
from twoends.engine.store import WeightStore
from twoends.kernels.ops import F32, I32, Ops
from twoends.model.attnres import Residual
from twoends.model.layer import attention_half, head_logits, mixture_half
from twoends.model.rows import SequenceRows

# Called with the number of layers done, after each.
LayerDone = Callable[[int], None]
# Called after the last layer: the embeddings of the rows, the residual stream, what the last norm reads.
Observe = Callable[[F32, Residual, F32], None]


def forward(
    ids_T: I32,
    sequences: Sequence[SequenceRows],
    *,
    config: ModelConfig,
    store: WeightStore,
    ops: Ops,
    layer_done: LayerDone,
    wanted: Sequence[int],
    look_ahead: LookAhead | None = None,
    observe: Observe | None = None,
) -> F32:
    """Logits of the rows that are `wanted`, in that order; every state moves on by its rows.

    `sequences` say whose rows the ids are, from the first to the last. Every weight is read once, whoever
    shares the pass, and a row's logits don't depend on the others. Where rows are tentative the state stays,
    until `Tentative.keep` moves it on. Raises ReadError, and NotSound from the router.
    """
    embedding_TD = store.embedding_rows(ids_T)
    residual = Residual(embedding_TD, config)
    for i in range(config.num_layers):
        with store.layer(i) as weights:  # layer i is arriving; what follows is already on its way
            attention_half(weights, residual, sequences, layer=i, config=config, ops=ops)
            experts = store.experts(i) if config.is_moe(i) else None
            mixture_half(weights, experts, residual, config=config, ops=ops)
            if look_ahead is not None:
                look_ahead.after_layer(i, weights, residual, ops)
        layer_done(i + 1)
    for rows in sequences:
        if rows.tentative is None:
            rows.state.position += rows.count
    with store.top() as top:
        h_TD = residual.input(top, "output_res", ops)
        if observe is not None:
            observe(embedding_TD, residual, h_TD)
        return head_logits(top, h_TD[list(wanted)], config, ops)
