"""What the training tests share: a tiny architecture with every K3 part, and weights anyone can regenerate.

Imports torch; a test module skips itself before it imports this.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from twoends.train.architecture import Architecture
from twoends.train.loop import Text
from twoends.train.model import KimiK3
from twoends.train.recipe import DataRecipe, Recipe, TokenizerRecipe, TrainRecipe

# Tiny products gain nothing from a second thread, and waiting for it costs.
torch.set_num_threads(1)


def tiny_architecture(**changes: Any) -> Architecture:
    """Seven layers: three AttnRes blocks, KDA and MLA in each, two adjacent MLA layers at the end."""
    fields: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 7, "vocab_size": 600, "intermediate_size": 48,
        "first_k_dense_replace": 1, "num_attention_heads": 3, "q_lora_rank": 16, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kda_num_heads": 3,
        "kda_head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "full_attn_layers": (3, 5, 6), "num_experts": 6, "num_experts_per_token": 2,
        "num_shared_experts": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
        "routed_scaling_factor": 1.0, "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3, "rms_norm_eps": 1e-5,
        "bos_token_id": 344, "eos_token_id": 345, "pad_token_id": 599,
    }  # fmt: skip
    return Architecture(**(fields | changes))


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of the golden models: a hash of name and flat index, scaled by the first rule that matches."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    h = (index * np.uint64(2654435761) + np.uint64(zlib.crc32(name.encode()))) & np.uint64(0xFFFFFFFF)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h ^= h >> np.uint64(shift)
        h = (h * np.uint64(multiplier)) & np.uint64(0xFFFFFFFF)
    h ^= h >> np.uint64(16)
    u = h.astype(np.float64) / 2.0**31 - 1
    if name.endswith("A_log"):
        u = 0.25 + 0.75 * u
    elif name.endswith("e_score_correction_bias"):
        u = 0.05 * u
    elif "conv1d" in name:
        u = 0.6 * u
    elif len(shape) == 1 and not name.endswith("dt_bias"):
        u = 1 + 0.2 * u
    elif not name.endswith(("dt_bias", "res_proj.weight", "embed_tokens.weight")):
        u = u * np.sqrt(3 / shape[-1])
    return u.astype(np.float32).astype(np.float64).reshape(shape)


def golden_model(arch: Architecture) -> KimiK3:
    """Binary64 model with the golden weights, experts unquantised."""
    model = KimiK3(arch).double()
    with torch.no_grad():
        for name, tensor in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
            short = name.removeprefix("model.")
            if ".experts.w" in short:
                bank, matrix = short.rsplit(".", 1)
                for e in range(tensor.shape[0]):
                    value = golden_weight(f"{bank}.{e}.{matrix}.weight", tuple(tensor.shape[1:]))
                    tensor[e] = torch.from_numpy(value)
            else:
                tensor.copy_(torch.from_numpy(golden_weight(short, tuple(tensor.shape))))
    for module in model.modules():
        if hasattr(module, "quantise"):
            module.quantise = torch.nn.Identity()
    return model.eval()


def tiny_recipe(**changes: Any) -> Recipe:
    """A run of seconds on `tiny_architecture`; `changes` are keys of [train]."""
    settings: dict[str, Any] = {
        "seed": 7, "steps": 6, "batch_rows": 2, "micro_rows": 2, "row_tokens": 24,
        "optimiser": "per-head-muon", "learning_rate": 3e-3, "final_learning_rate": 1e-4, "warmup_share": 0.3,
        "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "momentum": 0.95, "qk_clip": 100.0,
        "clip_norm": 1.0,
        "balance": "quantile", "router_bias_keep": 0.5, "sign_rate": 1e-3, "auxiliary_weight": 0.01,
        "expert_weights": "mxfp4", "expert_activations": "none", "pack_documents": True, "recompute": False,
        "mtp": False, "matmul_dtype": "float32", "compile": False, "snapshot_minutes": 60.0,
        "prompts": ("Once upon a time",),
    }  # fmt: skip
    return Recipe(
        model=tiny_architecture(),
        tokenizer=TokenizerRecipe(num_ranks=344, sample_characters=1, file=""),
        data=DataRecipe(stories=1, echoes=1, tasks=1, characters=1, shares={}),
        train=TrainRecipe(**(settings | changes)),
    )


def noise(*, rows: int = 9, tokens: int = 24) -> Text:
    """Rows without meaning in which an [EOS] (345) now and then ends a document."""
    ids = np.random.default_rng(0).integers(0, 346, (rows, tokens + 1)).astype(np.uint16)
    ids[:, tokens // 2] = 345
    return Text(rows=ids, heldout={"noise": ids[:3]}, bytes_of_id=(np.arange(600) < 344).astype(np.int64))
