"""The shape of a Kimi K3 text model, as the training side states it.

Field names are those of `text_config` in a released `config.json`; `release.py` turns the record into
that file and back. Layers are counted from 0 here; the released lists count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Every number that decides a tensor shape or an operation of the model. No field has a default."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    full_attn_layers: tuple[int, ...]
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    attn_res_block_size: int
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.full_attn_layers):
            raise ValueError(
                f"full_attn_layers {self.full_attn_layers} must lie in 0..{self.num_hidden_layers - 1}"
            )
        if self.num_experts_per_token >= self.num_experts:
            raise ValueError(
                f"num_experts_per_token ({self.num_experts_per_token}) must be below "
                f"num_experts ({self.num_experts}): quantile balancing needs one score more than it routes"
            )

    @property
    def kda_width(self) -> int:
        """Channels of q, k, v and the output gate in a KDA layer: heads times head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Scored dimensions of one MLA head: the per-head part and the part all heads share."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` mixes tokens by KDA (else by MLA)."""
        return layer not in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (else one dense MLP)."""
        return layer >= self.first_k_dense_replace
