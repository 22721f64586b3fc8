"""The definition of the bits, in numpy. docs/contracts.md says the same in words."""

from __future__ import annotations

from twoends.kernels.composed import composed
from twoends.kernels.ops import Ops
from twoends.kernels.reference import attnres, elementary, kda, matmul, mla, moe, mxfp8, norm


def reference_ops() -> Ops:
    """The numpy backend: slow, exact, and what every other backend must equal."""
    return composed(
        backend="reference",
        matmul=matmul.matmul,
        rms_norm=norm.rms_norm,
        short_conv=kda.short_conv,
        l2_norm=norm.l2_norm,
        kda_decay=kda.kda_decay,
        sigmoid=elementary.sigmoid,
        kda_steps=kda.kda_steps,
        gated_head_norm=norm.gated_head_norm,
        mla_heads=mla.mla_heads,
        sigmoid_gate=mla.sigmoid_gate,
        attnres_mix=attnres.attnres_mix,
        route=moe.route,
        situ_glu=moe.situ_glu,
        silu_glu=moe.silu_glu,
        mxfp8=mxfp8.mxfp8,
        combine=moe.combine,
    )
