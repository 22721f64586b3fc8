"""What the training tests share: a tiny architecture with every K3 part, and weights anyone can regenerate."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from twoends.train.architecture import Architecture  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of the golden models: a hash of name and flat index, scaled by the first rule that matches."""
    i = np.arange(int(np.prod(shape)), dtype=np.uint64)
    h = ((i * 2654435761 + zlib.crc32(name.encode())) & 0xFFFFFFFF).astype(np.uint64)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h ^= h >> np.uint64(shift)
        h = (h * np.uint64(multiplier)) & np.uint64(0xFFFFFFFF)
    h ^= h >> np.uint64(16)
    u = h.astype(np.float64) / 2.0**31 - 1
    if name.endswith("A_log"):
        u = 0.25 + 0.75 * u
    elif name.endswith("dt_bias"):
        pass
    elif name.endswith("e_score_correction_bias"):
        u = 0.05 * u
    elif "conv1d" in name:
        u = 0.6 * u
    elif len(shape) == 1:
        u = 1 + 0.2 * u
    elif not name.endswith(("res_proj.weight", "embed_tokens.weight")):
        u = u * np.sqrt(3 / shape[-1])
    return u.astype(np.float32).astype(np.float64).reshape(shape)


def golden_name(name: str) -> str:
    """Our parameter name without the `model.` prefix, as the golden rule wants it."""
    return name.removeprefix("model.")


def fill_golden(model: KimiK3) -> KimiK3:
    """Binary64 model with the golden weights, experts unquantised."""
    model.double()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            short = golden_name(name)
            if ".experts.w" in short:
                stem, which = short.rsplit(".", 1)
                for e in range(tensor.shape[0]):
                    value = golden_weight(f"{stem}.{e}.{which}.weight", tuple(tensor.shape[1:]))
                    tensor[e] = torch.from_numpy(value)
            else:
                tensor.copy_(torch.from_numpy(golden_weight(short, tuple(tensor.shape))))
    for module in model.modules():
        if hasattr(module, "quantise"):
            module.quantise = torch.nn.Identity()
    return model


@pytest.fixture
def tiny() -> Callable[..., Architecture]:
    """A maker of small architectures; keywords replace single fields."""

    def make(**changes: object) -> Architecture:
        fields: dict[str, object] = {
            "hidden_size": 32, "num_hidden_layers": 7, "vocab_size": 320, "intermediate_size": 48,
            "first_k_dense_replace": 1, "num_attention_heads": 3, "q_lora_rank": 16, "kv_lora_rank": 12,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kda_num_heads": 3,
            "kda_head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "full_attn_layers": (3, 5, 6), "num_experts": 6, "num_experts_per_token": 2,
            "num_shared_experts": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32,
            "routed_scaling_factor": 1.0, "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
            "bos_token_id": 64, "eos_token_id": 65, "pad_token_id": 319,
        }  # fmt: skip
        return Architecture(**(fields | changes))  # type: ignore[arg-type]

    return make
