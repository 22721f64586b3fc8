"""Documents to training rows: tokenised, ended with [EOS], packed. Batch n follows from n and the seed.

What comes after an [EOS] is no target: nothing in the text says which document is next.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import tiktoken

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
# A target that isn't one.
IGNORE = -1


def pack_rows(documents: list[str], *, encoder: tiktoken.Encoding, row_tokens: int, eos: int) -> Ids:
    """Rows of row_tokens + 1 ids [R, T+1]. A row starts with a document; the last one in it is cut.

    The rest of a cut document is dropped: a row never begins in the middle of a story.
    """
    rows: list[list[int]] = []
    row: list[int] = []
    for ids in encoder.encode_ordinary_batch(documents, num_threads=2):
        row += [*ids, eos]
        if len(row) > row_tokens:
            rows.append(row[: row_tokens + 1])
            row = []
    if encoder.n_vocab <= 1 << 16:
        return np.asarray(rows, dtype=np.uint16).reshape(-1, row_tokens + 1)
    return np.asarray(rows, dtype=np.uint32).reshape(-1, row_tokens + 1)


def batch(rows: Ids, *, step: int, batch_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Batch of `step` [batch_rows, T+1]; each pass over the rows has its own order."""
    per_epoch = len(rows) // batch_rows
    if per_epoch == 0:
        raise ValueError(f"{len(rows)} rows don't fill one batch of {batch_rows}")
    epoch, place = divmod(step, per_epoch)
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(rows))
    return rows[order[place * batch_rows : (place + 1) * batch_rows]].astype(np.int64)


def inputs_and_targets(
    ids_BT1: npt.NDArray[np.int64], *, eos: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and targets [B,T] of rows [B,T+1]; after an [EOS] the target is IGNORE."""
    inputs_BT, targets_BT = ids_BT1[:, :-1], ids_BT1[:, 1:]
    return inputs_BT, np.where(inputs_BT == eos, IGNORE, targets_BT)


def token_bytes(encoder: tiktoken.Encoding) -> npt.NDArray[np.int64]:
    """Bytes of text each id stands for; 0 for specials."""
    lengths = np.zeros(encoder.n_vocab, dtype=np.int64)
    for rank in range(encoder.n_vocab - len(encoder.special_tokens_set)):
        lengths[rank] = len(encoder.decode_single_token_bytes(rank))
    return lengths


def heldout_batches(rows: Ids, *, batch_rows: int) -> Iterator[npt.NDArray[np.int64]]:
    """Every row once, in order."""
    for start in range(0, len(rows), batch_rows):
        yield rows[start : start + batch_rows].astype(np.int64)
