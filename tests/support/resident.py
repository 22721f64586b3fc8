"""Whole models in memory for tests: the same protocols as the streamed store, none of its code."""

from __future__ import annotations

import numpy as np

from twoends.kernels.ops import ExpertWeights, Matrix
from twoends.kernels.reference.matmul import row_slice

HF_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "attn_res_norm": "self_attention_res_norm.weight",
    "attn_res_proj": "self_attention_res_proj.weight",
    "mlp_res_norm": "mlp_res_norm.weight",
    "mlp_res_proj": "mlp_res_proj.weight",
    "q_conv": "self_attn.q_conv1d.weight",
    "k_conv": "self_attn.k_conv1d.weight",
    "v_conv": "self_attn.v_conv1d.weight",
    "a_log": "self_attn.A_log",
    "dt_bias": "self_attn.dt_bias",
    "o_norm": "self_attn.o_norm.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "kv_a_proj": "self_attn.kv_a_proj_with_mqa.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "router": "block_sparse_moe.gate.weight",
    "router_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "latent_down": "block_sparse_moe.routed_expert_down_proj.weight",
    "latent_norm": "block_sparse_moe.routed_expert_norm.weight",
    "latent_up": "block_sparse_moe.routed_expert_up_proj.weight",
    "shared_gate": "block_sparse_moe.shared_experts.gate_proj.weight",
    "shared_up": "block_sparse_moe.shared_experts.up_proj.weight",
    "shared_down": "block_sparse_moe.shared_experts.down_proj.weight",
    "lm_head": "lm_head.weight",
    "final_norm": "norm.weight",
    "output_res_norm": "output_attn_res_norm.weight",
    "output_res_proj": "output_attn_res_proj.weight",
}


def f32_matrix(values) -> Matrix:
    values = np.ascontiguousarray(values, np.float32)
    data = values.reshape(-1).view(np.uint8)
    return Matrix(format="f32", rows=values.shape[0], cols=values.shape[1], data=data)


class NamedWeights:
    """Trunk weights from a function of the checkpoint's name; panels of a few rows."""

    def __init__(
        self, lookup, prefix: str, *, panel_rows: int = 7, head_rows: int = 0, dtype=np.float32
    ) -> None:
        self._lookup, self._prefix = lookup, prefix
        self._panel_rows, self._head_rows, self._dtype = panel_rows, head_rows, dtype

    def _tensor(self, name):
        return self._lookup(self._prefix + HF_NAMES.get(name, f"self_attn.{name}.weight"))

    def vector(self, name):
        values = self._tensor(name).astype(self._dtype)
        if name.endswith("_conv"):
            return np.ascontiguousarray(values.reshape(values.shape[0], -1))
        return np.ascontiguousarray(values.reshape(-1))

    def rows(self, name):
        return self._tensor(name).shape[0]

    def panels(self, names):
        """Groups of one panel, of two, of three, ...: how panels are grouped must not matter."""
        group = []
        size = 1
        for i, name in enumerate(names):
            matrix = f32_matrix(self._tensor(name))
            step = self._head_rows if name == "kv_b_proj" else self._panel_rows
            for first in range(0, matrix.rows, step):
                group.append((i, first, row_slice(matrix, first, min(first + step, matrix.rows))))
                if len(group) == size:
                    yield group
                    group, size = [], size + 1
        if group:
            yield group


class NamedExperts:
    """Experts in reverse order of request: arrival order must not matter."""

    def __init__(self, lookup, prefix: str) -> None:
        self._lookup, self._prefix = lookup, prefix

    def request(self, ids_TS):
        self._ids = sorted(set(ids_TS.reshape(-1).tolist()), reverse=True)

    def arrivals(self):
        for e in self._ids:
            w1, w2, w3 = (
                f32_matrix(self._lookup(f"{self._prefix}block_sparse_moe.experts.{e}.{w}.weight"))
                for w in ("w1", "w2", "w3")
            )
            yield [(e, ExpertWeights(w1=w1, w2=w2, w3=w3))]
