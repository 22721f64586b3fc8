"""A trained module as a checkpoint in the released layout, and back.

Names, shapes, dtypes and the order of bytes come from `twoends.checkpoint`; this file only says which number
goes where. Routed experts are the nibbles that the last forward pass multiplied; everything the release keeps
in F32 stays F32, the rest is rounded to BF16 (nearest, ties to even).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from twoends.checkpoint import mxfp4
from twoends.checkpoint.config import ModelConfig, read_config
from twoends.checkpoint.config_write import config_text
from twoends.checkpoint.layout import TensorPlan, checkpoint_plans
from twoends.checkpoint.writer import write_checkpoint, write_text
from twoends.errors import CheckpointError
from twoends.train.architecture import Architecture
from twoends.train.bpe import tokenizer_files
from twoends.train.model import KimiK3
from twoends.train.moe import ExpertBank

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123])\.(weight_packed|weight_scale)")
_PREFIX = "language_model."
# As released: nothing in the model counts positions, so nothing shorter would be true.
_MAX_LENGTH = 1 << 20


def model_config(arch: Architecture) -> ModelConfig:
    """The checkpoint side's record of the same model."""
    return ModelConfig(
        family="kimi-k3",
        num_layers=arch.num_hidden_layers,
        hidden_size=arch.hidden_size,
        vocab_size=arch.vocab_size,
        dense_width=arch.intermediate_size,
        num_dense_layers=arch.first_k_dense_replace,
        num_heads=arch.num_attention_heads,
        q_lora_rank=arch.q_lora_rank,
        kv_lora_rank=arch.kv_lora_rank,
        nope_dim=arch.qk_nope_head_dim,
        rope_dim=arch.qk_rope_head_dim,
        value_dim=arch.v_head_dim,
        mla_output_gate=True,
        kda_num_heads=arch.kda_num_heads,
        kda_head_dim=arch.kda_head_dim,
        conv_width=arch.short_conv_kernel_size,
        gate_lower_bound=arch.gate_lower_bound,
        full_rank_gate=True,
        num_experts=arch.num_experts,
        experts_per_token=arch.num_experts_per_token,
        num_shared_experts=arch.num_shared_experts,
        expert_width=arch.moe_intermediate_size,
        latent_width=arch.routed_expert_hidden_size,
        latent_norm=True,
        renormalize=True,
        routed_scaling=arch.routed_scaling_factor,
        activation="situ",
        situ_beta=arch.activation_situ_beta,
        situ_linear_beta=arch.activation_situ_linear_beta,
        attnres_block=arch.attn_res_block_size,
        eps=arch.rms_norm_eps,
        mla_layers=arch.full_attn_layers,
        bos_id=arch.bos_token_id,
        eos_id=arch.eos_token_id,
        pad_id=arch.pad_token_id,
    )


def architecture(config: ModelConfig) -> Architecture:
    """The inverse of `model_config`; a model without one of K3's parts is refused."""
    optional = {
        "q_lora_rank": config.q_lora_rank,
        "gate_lower_bound": config.gate_lower_bound,
        "routed_expert_hidden_size": config.latent_width,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "attn_res_block_size": config.attnres_block,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }
    flags = {
        "full-rank output gate": config.full_rank_gate,
        "MLA output gate": config.mla_output_gate,
        "latent norm": config.latent_norm,
        "renormalised router weights": config.renormalize,
        "SiTU": config.activation == "situ",
    }
    lacking = [name for name, value in optional.items() if value is None]
    lacking += [name for name, present in flags.items() if not present]
    if lacking:
        raise CheckpointError(
            f"Only models with every part of Kimi K3 can be trained; this one lacks {lacking}."
        )
    return Architecture(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        vocab_size=config.vocab_size,
        intermediate_size=config.dense_width,
        first_k_dense_replace=config.num_dense_layers,
        num_attention_heads=config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.nope_dim,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.value_dim,
        kda_num_heads=config.kda_num_heads,
        kda_head_dim=config.kda_head_dim,
        short_conv_kernel_size=config.conv_width,
        full_attn_layers=config.mla_layers,
        num_experts=config.num_experts,
        num_experts_per_token=config.experts_per_token,
        num_shared_experts=config.num_shared_experts,
        moe_intermediate_size=config.expert_width,
        routed_scaling_factor=config.routed_scaling,
        activation_situ_beta=config.situ_beta,
        rms_norm_eps=config.eps,
        **optional,  # type: ignore[arg-type]
    )


def _values(tensors: dict[str, Tensor], banks: dict[str, ExpertBank], plan: TensorPlan) -> npt.NDArray[Any]:
    """The bytes of one planned tensor, as an array of its storage type."""
    if match := _EXPERT.fullmatch(plan.name):
        bank, expert, matrix, what = match.groups()
        packed, scale = banks[bank.removeprefix(_PREFIX)].stored_bytes(matrix, int(expert))
        return packed if what == "weight_packed" else scale
    tensor = tensors[plan.name.removeprefix(_PREFIX)].detach().float()
    if plan.name.endswith("A_log"):
        tensor = torch.nn.functional.pad(tensor, (0, plan.shape[0] - tensor.shape[0]))
    if tuple(tensor.shape) != plan.shape:
        raise CheckpointError(f"{plan.name} is {tuple(tensor.shape)} here and {plan.shape} in the layout.")
    if not tensor.isfinite().all():
        raise CheckpointError(f"{plan.name} holds a value that isn't finite; nothing usable can be exported.")
    if plan.dtype == "F32":
        return tensor.numpy()
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()


def _named_tensors(model: KimiK3) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def export_checkpoint(model: KimiK3, directory: Path, *, ranks: list[bytes]) -> None:
    """Write `model` and its tokenizer as a directory that any reader of the release understands."""
    config = model_config(model.arch)
    tensors = _named_tensors(model)
    banks = {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}

    def source(plan: TensorPlan) -> Iterator[npt.NDArray[Any]]:
        yield _values(tensors, banks, plan)

    write_checkpoint(directory, list(checkpoint_plans(config, "mxfp4")), source)
    for name, text in tokenizer_files(ranks).items():
        write_text(directory / name, text)
    generation = {"max_length": _MAX_LENGTH, "eos_token_id": model.arch.eos_token_id}
    write_text(directory / "generation_config.json", json.dumps(generation, indent=2))
    write_text(directory / "config.json", config_text(config, expert_format="mxfp4"))


def load_checkpoint(directory: Path) -> KimiK3:
    """A released-layout directory (MXFP4 experts) as a module in binary32, for use or more training."""
    model = KimiK3(architecture(read_config(directory)))
    stored: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("model-*.safetensors")):
        stored |= load_file(shard)
    with torch.no_grad():
        for name, tensor in _named_tensors(model).items():
            if match := re.fullmatch(r"(.+\.experts)\.(w[123])", name):
                bank, matrix = match.groups()
                originals = model.get_submodule(bank).originals
                for expert in range(tensor.shape[0]):
                    prefix = f"{_PREFIX}{bank}.{expert}.{matrix}"
                    packed, scale = (
                        stored[f"{prefix}.weight_{part}"].numpy() for part in ("packed", "scale")
                    )
                    tensor[expert] = torch.from_numpy(mxfp4.decode(packed, scale))
                    originals[matrix, expert] = packed, scale
            else:
                value = stored[_PREFIX + name].float()
                tensor.copy_(value[: tensor.shape[0]] if name.endswith("A_log") else value)
    return model


def logits(directory: Path, ids: list[int]) -> npt.NDArray[np.float64]:
    """Logits [T, W] of the checkpoint in binary64: the torch side of the agreement with the engine."""
    model = load_checkpoint(directory).double().eval()
    with torch.no_grad():
        result: npt.NDArray[np.float64] = model(torch.tensor([ids]))[0].numpy()
    return result
