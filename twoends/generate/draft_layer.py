"""Drafts by one layer trained for this very model: it reads the hidden states that verified ids left behind.

A row of the layer belongs to one id that the model has gone through, and is made when the id after it is
known. From the last of them it guesses on with its own output in place of the model's hidden states; those
rows are dropped again. So nothing has to be undone when a guess was wrong.
"""

from __future__ import annotations

import numpy as np

from twoends.checkpoint.draft_config import feature_block
from twoends.checkpoint.draft_file import DraftFile
from twoends.engine.budget import MAX_CHUNK, scratch_bytes
from twoends.engine.open import Checkpoint, OpenModel
from twoends.engine.resident import head_entry, resident_bytes
from twoends.errors import NotSound
from twoends.generate.sampler import Sampling, pick
from twoends.kernels.ops import F32
from twoends.model.attnres import Residual
from twoends.model.draft_layer import DraftWeights, draft_logits, draft_rows, join_features
from twoends.model.mla import MlaPart
from twoends.model.state import MlaState

# Of a long pass so many rows are made together: enough for the products, little memory.
_ROWS_AT_ONCE = 8


class LayerDrafter:
    """Implements generate.drafts.Drafter; it watches the passes of the model that it was opened for."""

    def __init__(self, file: DraftFile, model: OpenModel, *, sampling: Sampling) -> None:
        """Takes all its memory at once (`layer_draft_bytes`) and reads its weights and the model's head.

        `sampling` is that of the run: a draw of the same number makes the same choice more likely.
        """
        plan, config = model.plan, file.layer
        self._model, self._sampling = model, sampling
        self._config, self._name = config, file.directory.name
        self._blocks = [feature_block(feature) for feature in file.config.features]
        self._head = model.store.resident_head()
        self._weights = DraftWeights(file.read(), self._head.panels)
        self.bytes_per_id = plan.embedding_bytes_per_token
        most_rows = max(plan.chunk_tokens, plan.draft_tokens + 1)
        # Of the newest pass: hidden states and embeddings of its rows, and the place of the first.
        self._features_NTD = np.full((len(self._blocks), most_rows, config.hidden_size), np.nan, np.float32)
        self._embedding_TD = np.full((most_rows, config.hidden_size), np.nan, np.float32)
        self._start = self._num_seen = self._num_used = 0
        self._state = MlaState(cache_CM=np.full((plan.context_tokens, config.latent_row), np.nan, np.float32))
        self._num_rows = 0
        self._last_1D: F32 | None = None
        model.watch(self._see)

    def propose(self, ids: list[int], count: int) -> list[int]:
        """`count` ids, each the one that the layer would choose after those before it."""
        self._use(len(ids) - 1, self._embedding(ids[-1]))
        assert self._last_1D is not None, "the model has gone through an id"
        h_1D, end = self._last_1D, self._num_rows
        draft: list[int] = []
        while True:
            draft.append(self._pick(h_1D, position=len(ids) + len(draft)))
            if len(draft) == count:
                break
            h_1D = self._rows(h_1D, self._embedding(draft[-1])[None], start=end)
            end += 1
        self._state.cache_CM[self._num_rows : end] = np.nan
        return draft

    def accept(self, count: int) -> None:
        """The next pass says what was kept."""

    def _see(self, start: int, ids: list[int], embedding_TD: F32, residual: Residual, h_TD: F32) -> None:
        """Notes a pass; what is left of the one before it is known to be right now, and used."""
        self._use(start, embedding_TD[0])
        rows = slice(0, len(ids))
        for feature_TD, block in zip(self._features_NTD, self._blocks, strict=True):
            feature_TD[rows] = h_TD if block is None else residual.block(block)
        self._embedding_TD[rows] = embedding_TD
        self._start = self._num_used = start
        self._num_seen = len(ids)

    def _use(self, end: int, following_D: F32) -> None:
        """Makes the rows of the newest pass up to place `end`, the embedding of whose id is `following_D`."""
        while self._num_seen and self._num_used < end:
            first = self._num_used - self._start
            stop = min(first + _ROWS_AT_ONCE, end - self._start)
            assert stop <= self._num_seen, "rows follow one another"
            next_D = following_D if stop == end - self._start else self._embedding_TD[stop]
            embedding_TD = np.concatenate([self._embedding_TD[first + 1 : stop], next_D[None]])
            features_NTD = np.ascontiguousarray(self._features_NTD[:, first:stop])
            g_TD = join_features(self._weights, features_NTD, self._config, self._model.ops)
            h_TD = self._rows(g_TD, embedding_TD, start=self._num_rows)
            self._num_rows += len(h_TD)
            self._num_used += len(h_TD)
            self._last_1D = h_TD[-1:].copy()

    def _rows(self, g_TD: F32, embedding_TD: F32, *, start: int) -> F32:
        count = len(g_TD)
        part = MlaPart(rows=slice(0, count), state=self._state, start=start, end=start + count)
        return draft_rows(self._weights, g_TD, embedding_TD, part, self._config, self._model.ops)

    def _embedding(self, token_id: int) -> F32:
        row_D: F32 = self._model.store.embedding_rows(np.array([token_id], np.int32))[0]
        return row_D

    def _pick(self, h_1D: F32, *, position: int) -> int:
        logits_W = draft_logits(self._weights, h_1D, self._config, self._model.ops)[0]
        if not np.isfinite(logits_W).all():
            raise NotSound(
                f"the draft {self._name} gave values that aren't finite for position {position:,}.",
                remedies=["No token was affected. Run without --draft-model, or export the draft again."],
            )
        return pick(logits_W, self._sampling, position=position)


def layer_draft_bytes(
    file: DraftFile,
    checkpoint: Checkpoint,
    *,
    context_tokens: int,
    chunk_tokens: int | None,
    draft_tokens: int,
) -> int:
    """What a LayerDrafter adds to a plan: the layer, a head, its cache, the hidden states of a pass."""
    config, num_features = file.layer, len(file.config.features)
    rows = max(min(chunk_tokens or MAX_CHUNK, context_tokens), draft_tokens + 1)
    noted = 4 * rows * (num_features + 1) * config.hidden_size
    joined = 4 * _ROWS_AT_ONCE * (2 * num_features + 6) * config.hidden_size
    head = resident_bytes(head_entry(checkpoint.config, checkpoint.index))
    cache = 4 * context_tokens * config.latent_row
    return file.num_bytes + head + cache + noted + joined + scratch_bytes(config, _ROWS_AT_ONCE)
