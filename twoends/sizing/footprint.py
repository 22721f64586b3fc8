"""What a model holds, from its config alone: parameters and bytes by part and format, state, latent cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twoends.checkpoint import names
from twoends.checkpoint.names import ExpertFormat, TensorSpec
from twoends.sizing.models import SizedModel

# Bytes per value of the released state and caches (BF16), and of this program's (binary32).
RELEASED_VALUE_BYTES = 2
OUR_VALUE_BYTES = 4
MILLION_TOKENS = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of the weights: how many values, their bytes as released, and those bytes by format."""

    name: str
    parameters: int
    num_bytes: int
    by_format: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """All parts of one model. "Trunk" is every layer but its routed experts; "top" is what is outside layers.

    `expert_bytes` are of one expert. Cache and state are of one sequence, for BF16 unless they say otherwise.
    """

    model: SizedModel
    parts: tuple[Part, ...]
    embedding: Part
    head: Part
    expert_parameters: int
    expert_bytes: int

    @property
    def parameters(self) -> int:
        """All of them, the vision tower included."""
        return sum(part.parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """All tensors, without the headers of their files."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def text_bytes(self) -> int:
        """What text needs: everything but the vision tower."""
        return sum(part.num_bytes for part in self.parts if part.name != VISION)

    @property
    def num_experts(self) -> int:
        """Routed experts over all layers."""
        return len(self.model.config.moe_layers) * self.model.config.num_experts

    @property
    def routed_bytes(self) -> int:
        """All routed experts."""
        return self.num_experts * self.expert_bytes

    @property
    def trunk_bytes(self) -> int:
        """The layers without their routed experts; embedding, head and last norms not counted."""
        return sum(part.num_bytes for part in self.parts if part.name not in (ROUTED, VISION, TOP))

    @property
    def trunk_parameters(self) -> int:
        """Values of the same."""
        return sum(part.parameters for part in self.parts if part.name not in (ROUTED, VISION, TOP))

    @property
    def top(self) -> Part:
        """Embedding, head and last norms."""
        return next(part for part in self.parts if part.name == TOP)

    @property
    def experts_per_token(self) -> int:
        """Experts that one token chooses over all layers: one token cycle."""
        return len(self.model.config.moe_layers) * self.model.config.experts_per_token

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied with; the embedding, of which it reads a row, is not counted."""
        resident = self.trunk_parameters + self.top.parameters - self.embedding.parameters
        return resident + self.experts_per_token * self.expert_parameters

    @property
    def routed_bytes_per_token(self) -> int:
        """The chosen experts of one token."""
        return self.experts_per_token * self.expert_bytes

    @property
    def bytes_per_token(self) -> int:
        """Trunk and chosen experts: one token's reading with nothing cached but embedding and head."""
        return self.trunk_bytes + self.routed_bytes_per_token

    @property
    def state_values(self) -> int:
        """Values of the KDA layers' recurrent matrices of one sequence."""
        config = self.model.config
        return len(config.kda_layers) * config.kda_num_heads * config.kda_head_dim**2

    @property
    def tail_values(self) -> int:
        """Values of the KDA layers' convolution tails of one sequence."""
        config = self.model.config
        return len(config.kda_layers) * 3 * (config.conv_width - 1) * config.kda_width

    @property
    def cache_bytes_per_layer(self) -> int:
        """Latent cache of one token in one MLA layer."""
        return RELEASED_VALUE_BYTES * self.model.config.latent_row

    @property
    def cache_bytes_per_token(self) -> int:
        """Latent cache of one token over the MLA layers."""
        return len(self.model.config.mla_layers) * self.cache_bytes_per_layer

    @property
    def all_latent_bytes_per_token(self) -> int:
        """The same if every layer were MLA: a latent full-attention model of this depth."""
        return self.model.config.num_layers * self.cache_bytes_per_layer

    @property
    def all_heads_bytes_per_token(self) -> int:
        """Keys and values of every head in every layer: a plain full-attention model of this depth."""
        config = self.model.config
        values = config.num_heads * (config.nope_dim + config.value_dim)
        return RELEASED_VALUE_BYTES * config.num_layers * values

    def sequence_bytes(self, context_tokens: int, *, value_bytes: int) -> int:
        """Everything that one sequence of that length carries: state, tails, latent cache."""
        config = self.model.config
        cache = len(config.mla_layers) * config.latent_row * context_tokens
        return value_bytes * (self.state_values + self.tail_values + cache)


ROUTED = "routed experts"
VISION = "vision tower, projector"
TOP = "embedding, head, norms"
_KDA, _MLA, _MOE = "KDA attention", "MLA attention", "router, shared experts"
_DENSE, _SMALL = "dense feed-forward", "norms, residual mixes"


def footprint(model: SizedModel) -> Footprint:
    """Counts every tensor that the released layout of this config has."""
    config = model.config
    groups: dict[str, list[TensorSpec]] = {}
    for layer in range(config.num_layers):
        for spec in names.layer_specs(config, layer):
            part = _part_of(spec, is_mla=config.is_mla(layer), is_moe=config.is_moe(layer))
            groups.setdefault(part, []).append(spec)
    top = names.top_specs(config)
    parts = [_part(name, groups[name]) for name in (_KDA, _MLA, _MOE, _DENSE, _SMALL) if name in groups]
    parts.append(_part(TOP, list(top)))
    expert = list(names.expert_parts(config, model.expert_format))
    values = sum(_values(spec, model.expert_format) for spec in expert)
    expert_bytes = sum(spec.nbytes for spec in expert)
    count = len(config.moe_layers) * config.num_experts
    routed = (model.expert_format.upper(), count * expert_bytes)
    parts.append(
        Part(name=ROUTED, parameters=count * values, num_bytes=count * expert_bytes, by_format=(routed,))
    )
    if model.vision_parameters:
        num_bytes = RELEASED_VALUE_BYTES * model.vision_parameters
        parts.append(
            Part(
                name=VISION,
                parameters=model.vision_parameters,
                num_bytes=num_bytes,
                by_format=(("BF16", num_bytes),),
            )
        )
    found = {spec.short: spec for spec in top}
    return Footprint(
        model=model,
        parts=tuple(parts),
        embedding=_part("embedding", [found["embed"]]),
        head=_part("head", [found["lm_head"]]),
        expert_parameters=values,
        expert_bytes=expert_bytes,
    )


def bytes_by_format(parts: tuple[Part, ...]) -> Iterator[tuple[str, int]]:
    """(format, bytes) over all parts, largest first."""
    sums: dict[str, int] = {}
    for part in parts:
        for form, num_bytes in part.by_format:
            sums[form] = sums.get(form, 0) + num_bytes
    yield from sorted(sums.items(), key=lambda item: -item[1])


def _part_of(spec: TensorSpec, *, is_mla: bool, is_moe: bool) -> str:
    outer = ("input_norm", "post_attn_norm", "attn_res_norm", "attn_res_proj", "mlp_res_norm", "mlp_res_proj")
    if spec.short in outer:
        return _SMALL
    if ".self_attn." in spec.file_name:
        return _MLA if is_mla else _KDA
    return _MOE if is_moe else _DENSE


def _part(name: str, specs: list[TensorSpec]) -> Part:
    sums: dict[str, int] = {}
    for spec in specs:
        sums[spec.released] = sums.get(spec.released, 0) + spec.nbytes
    return Part(
        name=name,
        parameters=sum(names.num_values(spec.shape) for spec in specs),
        num_bytes=sum(sums.values()),
        by_format=tuple(sums.items()),
    )


def _values(spec: TensorSpec, expert_format: ExpertFormat) -> int:
    """Weights of one tensor of an expert: packed bytes hold two, scales none."""
    stored = names.num_values(spec.shape)
    if expert_format != "mxfp4":
        return stored
    return 2 * stored if spec.short.endswith("_packed") else 0
