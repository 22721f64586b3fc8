"""ModelConfig -> config.json: the inverse of config.py, in the form of each family's release."""

from __future__ import annotations

import json
from typing import Any

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.names import ExpertFormat

_MAX_POSITIONS = 1 << 20


def config_text(config: ModelConfig, *, expert_format: ExpertFormat) -> str:
    """The text of config.json: sorted keys, two spaces, a last newline. config.py reads it back."""
    raw = config_object(config, expert_format=expert_format)
    return json.dumps(raw, indent=2, sort_keys=True) + "\n"


def config_object(config: ModelConfig, *, expert_format: ExpertFormat) -> dict[str, Any]:
    """The object of config.json. Kimi-Linear's layout has no room for K3's parts: ValueError."""
    if config.family == "kimi-k3":
        return _k3(config, expert_format)
    foreign = (config.attnres_block, config.latent_width, config.gate_lower_bound)
    if any(part is not None for part in foreign) or config.mla_output_gate or config.full_rank_gate:
        raise ValueError("Kimi-Linear's config.json can't state parts of Kimi K3")
    return _kimi_linear(config)


def _k3(config: ModelConfig, expert_format: ExpertFormat) -> dict[str, Any]:
    text = {
        **_shared(config),
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": config.attnres_block,
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": "modeling_kimi_linear.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
        },
        "hidden_act": config.activation,
        "latent_moe_use_norm": config.latent_norm,
        "linear_attn_config": {
            **_linear_attention(config),
            "gate_lower_bound": config.gate_lower_bound,
            "use_full_rank_gate": config.full_rank_gate,
        },
        "max_position_embeddings": _MAX_POSITIONS,
        "mla_use_output_gate": config.mla_output_gate,
        "routed_expert_hidden_size": config.latent_width,
        "topk_method": "noaux_tc",
    }
    if expert_format == "mxfp4":
        text["quantization_config"] = _quantization()
    main = "modeling_kimi_k3.KimiK3ForConditionalGeneration"
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": main,
            "AutoModelForCausalLM": main,
        },
        "bos_token_id": config.bos_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_id,
        "ignore_index": -100,
        "model_type": "kimi_k3",
        "pad_token_id": config.pad_id,
        "text_config": text,
        "tie_word_embeddings": False,
    }


def _kimi_linear(config: ModelConfig) -> dict[str, Any]:
    return {
        **_shared(config),
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "hidden_act": "silu",
        "linear_attn_config": _linear_attention(config),
        "model_max_length": _MAX_POSITIONS,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    }


def _shared(config: ModelConfig) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_id,
        "first_k_dense_replace": config.num_dense_layers,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.dense_width,
        "kv_lora_rank": config.kv_lora_rank,
        "mla_use_nope": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": config.expert_width,
        "moe_layer_freq": 1,
        "moe_renormalize": config.renormalize,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": config.num_heads,
        "num_expert_group": 1,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": config.num_shared_experts,
        "pad_token_id": config.pad_id,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "rms_norm_eps": config.eps,
        "routed_scaling_factor": config.routed_scaling,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": config.value_dim,
        "vocab_size": config.vocab_size,
    }


def _linear_attention(config: ModelConfig) -> dict[str, Any]:
    """The file counts layers from 1."""
    return {
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "head_dim": config.kda_head_dim,
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "num_heads": config.kda_num_heads,
        "short_conv_kernel_size": config.conv_width,
    }


def _quantization() -> dict[str, Any]:
    """The release's record of MXFP4 experts, its ignore list (wrong as a scope) included."""
    kind = "mxfp4-pack-quantized"
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": kind,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    ignored = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower")
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": None,
        "ignore": [f"re:.*{name}.*" for name in (*ignored, "mm_projector")],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
