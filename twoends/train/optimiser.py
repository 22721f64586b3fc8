"""One optimiser for the whole model: Muon where a weight is a matrix, AdamW for everything else.

AdamW keeps embeddings, head, router, norms, biases, convolution filters, A_log, dt_bias and depth queries,
and every matrix with a side of one. Parameters may be plain tensors or shards (DTensor, as FSDP2 makes them):
state is kept per shard. A shard that holds whole matrices, whole experts or whole heads is made orthogonal
where it is; any other matrix is gathered, worked on by every rank alike, and cut again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.adamw import adamw

from twoends.errors import OptionError
from twoends.train.kda import KimiDeltaAttention
from twoends.train.mla import GatedLatentAttention
from twoends.train.moe import Router
from twoends.train.muon import apply_updates

OPTIMISERS = ("per-head-muon", "muon", "adamw")
_ADAM_EPS = 1e-10


def learning_rate_at(
    step: int, *, steps: int, peak: float, final: float, warmup_share: float = 0.01
) -> float:
    """Rate of `step` (from 0): linear over the first warmup_share of the steps, then half a cosine."""
    warmup = max(1, math.ceil(steps * warmup_share))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


def head_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Row pattern of one head in each weight whose rows are the heads of a query, key or value."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KimiDeltaAttention):
            rows = module.q_proj.weight.shape[0] // module.heads
            found |= {f"{name}.{which}_proj.weight": (rows,) for which in "qkv"}
        elif isinstance(module, GatedLatentAttention):
            found[f"{name}.q_b_proj.weight"] = (module.nope + module.rope,)
            found[f"{name}.kv_b_proj.weight"] = (module.nope, module.value)
    return found


def _not_for_muon(model: nn.Module) -> set[str]:
    """Parameters with two axes or more that AdamW keeps."""
    kept = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | Router) or name == "lm_head":
            kept.add(f"{name}.weight")
    return kept


def _is_decayed(name: str, parameter: Tensor) -> bool:
    """Only matrices decay: no norm, bias, gate of decay, filter or depth query."""
    return parameter.ndim >= 2 and "conv1d" not in name and "res_proj" not in name


def parameter_groups(model: nn.Module, *, kind: str, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of `kind`, each with its rule ("muon" or "adamw"), decay and, for Muon, head rows."""
    if kind not in OPTIMISERS:
        raise OptionError(f"There is no optimiser {kind!r}; there is {', '.join(OPTIMISERS)}.")
    heads = head_rows(model) if kind == "per-head-muon" else {}
    kept = _not_for_muon(model)
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = _is_decayed(name, parameter)
        by_muon = kind != "adamw" and decayed and name not in kept and min(parameter.shape[-2:]) > 1
        decay = weight_decay if decayed else 0.0
        key = ("muon", decay, heads.get(name, ())) if by_muon else ("adamw", decay, ())
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "rule": rule, "weight_decay": decay, "head_rows": rows}
        for (rule, decay, rows), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def _holds_whole_blocks(weight: DTensor, rows: tuple[int, ...]) -> bool:
    """Whether every rank's shard is whole matrices of a stack, or whole heads; the same on every rank."""
    split = [place for place in weight.placements if not isinstance(place, Replicate)]
    if not split:
        return True
    if len(split) > 1 or not isinstance(split[0], Shard) or split[0].dim != 0:
        return False
    if weight.ndim == 3:
        return True
    ranks = weight.device_mesh.size(list(weight.placements).index(split[0]))
    return bool(rows) and -(-weight.shape[0] // ranks) % sum(rows) == 0


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW by group; state `momentum`, or `step`, `exp_avg` and `exp_avg_sq`, per parameter.

    State and sums are binary32; Muon's products run in `matmul_dtype` (None: binary32 too).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        momentum: float,
        matmul_dtype: torch.dtype | None = None,
    ) -> None:
        self._matmul_dtype = matmul_dtype
        defaults = {"lr": learning_rate, "betas": betas, "momentum": momentum, "eps": _ADAM_EPS}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._muon if group["rule"] == "muon" else self._adamw)(group)
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        rate, momentum, rows = float(group["lr"]), group["momentum"], tuple(group["head_rows"])
        how: dict[str, Any] = {"head_rows": rows, "learning_rate": rate, "matmul_dtype": self._matmul_dtype}
        pairs: list[tuple[Tensor, Tensor]] = []
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            state["momentum"].mul_(momentum).add_(weight.grad)
            direction = weight.grad.add(state["momentum"], alpha=momentum)
            weight.mul_(1 - rate * group["weight_decay"])
            if not isinstance(weight, DTensor):
                pairs.append((weight, direction))
            elif _holds_whole_blocks(weight, rows):
                pairs.append((weight.to_local(), direction.to_local()))
            else:
                whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
                apply_updates([(whole, direction.full_tensor())], **how)
                spread = DTensor.from_local(
                    whole, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim
                )
                weight.add_(spread.redistribute(placements=weight.placements))
        apply_updates(pairs, **how)

    def _adamw(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        if not weights:
            return
        states = [self.state[weight] for weight in weights]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [weight.grad for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def make_optimiser(
    model: nn.Module,
    *,
    kind: str,
    learning_rate: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    momentum: float = 0.95,
    matmul_dtype: torch.dtype | None = None,
) -> MuonAdamW:
    """The optimiser `kind` of `model`: "per-head-muon" (the recipe), "muon" (whole matrices) or "adamw"."""
    groups = parameter_groups(model, kind=kind, weight_decay=weight_decay)
    return MuonAdamW(
        groups,
        learning_rate=learning_rate,
        betas=(beta1, beta2),
        momentum=momentum,
        matmul_dtype=matmul_dtype,
    )
