"""The shapes of our synthetic checkpoints.

nano   seconds; sizes that are no powers of two and no multiples of a vector, on purpose
mini   about 1.7 GB (Kimi K3), the shape on which other out-of-core engines were measured
midi   about 7.7 GB (Kimi K3)
layer  Kimi K3's true dimensions with few layers
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from twoends.checkpoint.config import Family, ModelConfig
from twoends.errors import OptionError

Preset = Literal["nano", "mini", "midi", "layer"]

NUM_SPECIALS = 256
# Places of the special tokens that a config names, counted from the number of ranks.
_BOS, _EOS, _PAD = 0, 2, 255

_SIZES: dict[str, dict[str, Any]] = {
    "nano": {
        "num_layers": 9, "hidden_size": 104, "vocab_size": 768, "dense_width": 200, "attnres_block": 4,
        "num_heads": 3, "q_lora_rank": 40, "kv_lora_rank": 36, "nope_dim": 24, "rope_dim": 8, "value_dim": 24,
        "kda_num_heads": 5, "kda_head_dim": 24,
        "num_experts": 14, "experts_per_token": 4, "expert_width": 96, "latent_width": 64,
    },
    "mini": {
        "num_layers": 24, "hidden_size": 1024, "vocab_size": 8192, "dense_width": 4096, "attnres_block": 12,
        "num_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 256,
        "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kda_num_heads": 8, "kda_head_dim": 128,
        "num_experts": 128, "experts_per_token": 8, "expert_width": 512, "latent_width": 512,
    },
    "midi": {
        "num_layers": 20, "hidden_size": 2048, "vocab_size": 8192, "dense_width": 8192, "attnres_block": 12,
        "num_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512,
        "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kda_num_heads": 16, "kda_head_dim": 128,
        "num_experts": 192, "experts_per_token": 12, "expert_width": 1024, "latent_width": 1024,
    },
    "layer": {
        "num_layers": 5, "hidden_size": 7168, "vocab_size": 163840, "dense_width": 33792, "attnres_block": 12,
        "num_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kda_num_heads": 96, "kda_head_dim": 128,
        "num_experts": 896, "experts_per_token": 16, "expert_width": 3072, "latent_width": 3584,
    },
}  # fmt: skip
# Without a latent, experts are as wide as the model and stay BF16: fewer and narrower, for like sizes.
_KIMI_LINEAR_EXPERTS: dict[str, dict[str, Any]] = {
    "nano": {"expert_width": 56},
    "mini": {"num_experts": 64, "expert_width": 256},
    "midi": {"num_experts": 64, "experts_per_token": 8, "expert_width": 512},
}


def preset_config(preset: str, *, family: Family = "kimi-k3", num_layers: int | None = None) -> ModelConfig:
    """The architecture of a preset; `num_layers` changes its depth. Raises OptionError."""
    if preset not in get_args(Preset):
        raise OptionError(
            f"There is no preset '{preset}'.", remedies=[f"Presets: {', '.join(get_args(Preset))}"]
        )
    if family not in get_args(Family):
        raise OptionError(f"There is no family '{family}'.", remedies=["Families: kimi-k3, kimi-linear"])
    if preset == "layer" and family != "kimi-k3":
        raise OptionError("The preset 'layer' has Kimi K3's dimensions; it exists for kimi-k3 only.")
    sizes = dict(_SIZES[preset])
    depth = sizes["num_layers"] if num_layers is None else num_layers
    if not 2 <= depth <= 4096:
        raise OptionError(f"A synthetic checkpoint has 2 to 4096 layers, not {depth}.")
    # As released: every fourth layer, and the last one.
    mla_layers = tuple(i for i in range(depth) if i % 4 == 3 or i == depth - 1)
    ranks = sizes["vocab_size"] - NUM_SPECIALS
    config = ModelConfig(
        family="kimi-k3",
        **{**sizes, "num_layers": depth},
        num_dense_layers=1,
        mla_output_gate=True,
        conv_width=4,
        gate_lower_bound=-5.0,
        full_rank_gate=True,
        num_shared_experts=2,
        latent_norm=True,
        renormalize=True,
        routed_scaling=1.0,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        eps=1e-5,
        mla_layers=mla_layers,
        bos_id=ranks + _BOS,
        eos_id=ranks + _EOS,
        pad_id=ranks + _PAD,
    )
    return config if family == "kimi-k3" else _as_kimi_linear(config, preset)


def _as_kimi_linear(config: ModelConfig, preset: str) -> ModelConfig:
    return dataclasses.replace(
        config,
        family="kimi-linear",
        q_lora_rank=None,
        mla_output_gate=False,
        gate_lower_bound=None,
        full_rank_gate=False,
        num_shared_experts=1,
        latent_width=None,
        latent_norm=False,
        routed_scaling=2.446,
        activation="silu",
        situ_beta=1.0,
        situ_linear_beta=None,
        attnres_block=None,
        **_KIMI_LINEAR_EXPERTS[preset],
    )
