"""The weight rule and configs of the tiny golden models (specification 11.2), written from its text."""

from __future__ import annotations

import zlib

import numpy as np

from twoends.checkpoint.config import ModelConfig


def golden_tensor(name: str, shape: tuple[int, ...]):
    count = int(np.prod(shape))
    i = np.arange(count, dtype=np.uint64)
    h = ((i * 2654435761 + zlib.crc32(name.encode())) & 0xFFFFFFFF).astype(np.uint32)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    u = (h.astype(np.float64) / 2**31 - 1).reshape(shape)
    return _rule(name, u).astype(np.float32)


def _rule(name, u):
    if name.endswith("A_log"):
        return 0.25 + 0.75 * u
    if name.endswith("dt_bias"):
        return u
    if name.endswith("e_score_correction_bias"):
        return 0.05 * u
    if "conv1d" in name:
        return 0.6 * u
    if u.ndim == 1:
        return 1 + 0.2 * u
    if name.endswith(("res_proj.weight", "embed_tokens.weight")):
        return u
    return u * np.sqrt(3 / u.shape[-1])


def golden_config(raw) -> ModelConfig:
    linear = raw["linear_attn_config"]
    return ModelConfig(
        family="kimi-k3" if raw["attn_res_block_size"] else "kimi-linear",
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        vocab_size=raw["vocab_size"],
        dense_width=raw["intermediate_size"],
        num_dense_layers=raw["first_k_dense_replace"],
        num_heads=raw["num_attention_heads"],
        q_lora_rank=raw["q_lora_rank"],
        kv_lora_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        mla_output_gate=raw["mla_use_output_gate"],
        kda_num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_width=linear["short_conv_kernel_size"],
        gate_lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=linear.get("use_full_rank_gate", False),
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_token"],
        num_shared_experts=raw["num_shared_experts"],
        expert_width=raw["moe_intermediate_size"],
        latent_width=raw["routed_expert_hidden_size"],
        latent_norm=raw["latent_moe_use_norm"],
        renormalize=raw["moe_renormalize"],
        routed_scaling=raw["routed_scaling_factor"],
        activation=raw["hidden_act"],
        situ_beta=raw["activation_situ_beta"],
        situ_linear_beta=raw["activation_situ_linear_beta"],
        attnres_block=raw["attn_res_block_size"],
        eps=raw["rms_norm_eps"],
        mla_layers=tuple(i - 1 for i in linear["full_attn_layers"]),
        bos_id=None,
        eos_id=None,
        pad_id=None,
    )


def golden_shapes(c: ModelConfig):
    """Function from a checkpoint name (without layer) to its shape."""
    width, d = c.kda_width, c.hidden_size
    gate_width = c.kda_width
    by_suffix = {
        "embed_tokens.weight": (c.vocab_size, d),
        "lm_head.weight": (c.vocab_size, d),
        "res_proj.weight": (1, d),
        "q_conv1d.weight": (width, 1, c.conv_width),
        "k_conv1d.weight": (width, 1, c.conv_width),
        "v_conv1d.weight": (width, 1, c.conv_width),
        "A_log": (c.kda_num_heads,),
        "dt_bias": (width,),
        "o_norm.weight": (c.kda_head_dim,),
        "q_a_layernorm.weight": (c.q_lora_rank,),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "routed_expert_norm.weight": (c.latent_width,),
        "e_score_correction_bias": (c.num_experts,),
        "q_a_proj.weight": (c.q_lora_rank, d),
        "q_b_proj.weight": (c.num_heads * c.query_dim, c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.latent_row, d),
        "kv_b_proj.weight": (c.num_heads * (c.nope_dim + c.value_dim), c.kv_lora_rank),
        "f_a_proj.weight": (c.kda_head_dim, d),
        "f_b_proj.weight": (width, c.kda_head_dim),
        "g_a_proj.weight": (c.kda_head_dim, d),
        "g_b_proj.weight": (width, c.kda_head_dim),
        "g_proj.weight": (gate_width, d),
        "b_proj.weight": (c.kda_num_heads, d),
        "block_sparse_moe.gate.weight": (c.num_experts, d),
        "routed_expert_down_proj.weight": (c.latent_width, d),
        "routed_expert_up_proj.weight": (d, c.latent_width),
        "shared_experts.gate_proj.weight": (c.shared_width, d),
        "shared_experts.up_proj.weight": (c.shared_width, d),
        "shared_experts.down_proj.weight": (d, c.shared_width),
        "mlp.gate_proj.weight": (c.dense_width, d),
        "mlp.up_proj.weight": (c.dense_width, d),
        "mlp.down_proj.weight": (d, c.dense_width),
        "w1.weight": (c.expert_width, c.expert_input),
        "w3.weight": (c.expert_width, c.expert_input),
        "w2.weight": (c.expert_input, c.expert_width),
    }

    def shape(name: str) -> tuple[int, ...]:
        if ".self_attn." in name:
            layer = int(name.split(".")[1])
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                rows = c.num_heads * c.query_dim if c.is_mla(layer) else width
                return (rows, d)
            if name.endswith("o_proj.weight"):
                return (d, c.num_heads * c.value_dim if c.is_mla(layer) else width)
        for suffix, value in by_suffix.items():
            if name.endswith(suffix):
                return value
        return (d,)

    return shape
