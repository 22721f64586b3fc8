"""Documents that share a row: which tokens belong together, and where nothing may pass.

`documents_BT` is int64 [B,T]: equal numbers side by side are one document, -1 is padding. Attention, the
short convolution and the KDA state of a token see its own document only.
"""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1


def documents_of_rows(ids_BT: Tensor, *, eos: int) -> Tensor:
    """Documents of rows whose texts end with `eos`: the token behind an eos begins the next one."""
    ends = (ids_BT == eos).long()
    return ends.cumsum(1) - ends


def documents_of_lengths(cu_seqlens: Tensor, *, tokens: int) -> Tensor:
    """Documents [1, tokens] of one row from cumulative lengths (0, n_0, n_0 + n_1, ...).

    Tokens behind the last length are padding. Lengths that fall, don't begin at 0 or exceed the row are
    refused.
    """
    bounds = cu_seqlens.to(torch.int64)
    if bounds.ndim != 1 or not len(bounds) or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0, not {cu_seqlens.tolist()}")
    if int(bounds[-1]) > tokens:
        raise ValueError(f"cu_seqlens ends at {int(bounds[-1])}, behind the row's {tokens} tokens")
    place = torch.arange(tokens, device=bounds.device)
    numbers = torch.searchsorted(bounds, place, right=True) - 1
    return torch.where(place < bounds[-1], numbers, PADDING)[None]


def lengths_of_documents(documents_BT: Tensor) -> Tensor:
    """cu_seqlens of all rows laid end to end, int32; a run of padding counts as a document of its own."""
    flat, columns = documents_BT.flatten(), documents_BT.shape[1]
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    starts[::columns] = True
    ends = torch.tensor([len(flat)], device=flat.device)
    return torch.cat([starts.nonzero().squeeze(1), ends]).to(torch.int32)
