"""The one legend of dimension letters. Arrays end in their dimensions: `h_TD`, `state_HKV`.

    T  rows of a pass (tokens)         D  model width (7168 in Kimi K3)
    H  heads (96)                      K  key channels of a KDA head (128)
    V  value channels of a head (128)  P  projection width of KDA, H * K (12288)
    L  latent rank of MLA (512)        R  unrotated "rope" slots (64)
    M  L + R, one row of latent cache  Q  nope + R, one query head (192)
    C  cached positions                E  experts (896)
    S  chosen experts per token (16)   Z  routed latent width (3584)
    F  expert hidden width (3072)      G  dense hidden width (33792)
    N  sources of Attention Residuals  W  vocabulary (163840)
    X  input width of a matrix         Y  output width (rows) of a matrix

Capitals are logical sizes, never shards.
"""

from __future__ import annotations
