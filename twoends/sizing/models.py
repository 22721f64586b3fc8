"""The model to be sized: a released one by name, or the config of a directory. No weight is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoends.checkpoint.config import ModelConfig, parse_config, read_json_object
from twoends.checkpoint.names import ExpertFormat
from twoends.errors import ConfigError, OptionError
from twoends.sizing.tables import asset, nearest

RELEASES = ("kimi-k3", "kimi-linear")
_ORIGIN = {
    "kimi-k3": "config.json of moonshotai/Kimi-K3 (sha256 9710e121...)",
    "kimi-linear": "config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct (sha256 a6ac3c2c...)",
}
# Fields of vision_config that the count of its parameters takes.
_VISION = (
    "patch_size", "init_pos_emb_height", "init_pos_emb_width", "vt_num_hidden_layers", "vt_hidden_size",
    "qkv_hidden_size", "vt_intermediate_size", "merge_kernel_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A config and what else its file states. `vision_parameters` are BF16 and not run by this program."""

    name: str
    origin: str
    config: ModelConfig
    expert_format: ExpertFormat
    vision_parameters: int
    max_context_tokens: int

    @property
    def release(self) -> str | None:
        """The released model that this is, by its architecture; measured curves belong to releases."""
        for name in RELEASES:
            if _released(name).config.digest == self.config.digest:
                return name
        return None


def load_model(word: str) -> SizedModel:
    """A released model by name, or a directory with a config.json. Raises OptionError, ConfigError."""
    if word in RELEASES and not Path(word).is_dir():
        return _released(word)
    directory = Path(word)
    if (directory / "config.json").is_file():
        source = directory / "config.json"
        return _from_object(read_json_object(source), source=source, name=word, origin=str(source))
    if directory.is_dir():
        raise ConfigError(
            f"There is no config.json in {directory}.", evidence=[("directory", str(directory))]
        )
    raise OptionError(
        f"'{word}' is neither a released model nor a directory.",
        evidence=[("nearest known name", nearest(word, RELEASES))],
        remedies=[f"Released models: {', '.join(RELEASES)}; or the directory of a checkpoint or a config"],
    )


def _released(name: str) -> SizedModel:
    source = asset(name) / "config.json"
    return _from_object(read_json_object(source), source=source, name=name, origin=_ORIGIN[name])


def _from_object(raw: Mapping[str, Any], *, source: Path, name: str, origin: str) -> SizedModel:
    config = parse_config(raw, source=source)
    text = raw.get("text_config", raw)
    quantised = isinstance(text, Mapping) and text.get("quantization_config") is not None
    longest = text.get("max_position_embeddings", text.get("model_max_length"))
    if not isinstance(longest, int) or longest < 1:
        raise ConfigError(
            f"{source.name} does not say how long a context may be.",
            evidence=[("file", str(source)), ("fields", "max_position_embeddings, model_max_length")],
        )
    return SizedModel(
        name=name,
        origin=origin,
        config=config,
        expert_format="mxfp4" if quantised else "bf16",
        vision_parameters=_vision_parameters(raw.get("vision_config"), config, source=source),
        max_context_tokens=longest,
    )


def _vision_parameters(raw: Any, config: ModelConfig, *, source: Path) -> int:
    """Values of the vision tower and its projector; 0 for a model without."""
    if raw is None:
        return 0
    missing = [key for key in _VISION if not isinstance(raw, Mapping) or key not in raw]
    if missing:
        raise ConfigError(
            f"vision_config in {source.name} has no '{missing[0]}'.", evidence=[("file", str(source))]
        )
    width, inner, hidden = raw["vt_hidden_size"], raw["qkv_hidden_size"], raw["vt_intermediate_size"]
    patches = width * 3 * raw["patch_size"] ** 2
    positions = raw["init_pos_emb_height"] * raw["init_pos_emb_width"] * width
    block = 2 * width + 3 * inner * width + inner * width + 2 * hidden * width
    merged = width * raw["merge_kernel_size"][0] * raw["merge_kernel_size"][1]
    tower = patches + positions + raw["vt_num_hidden_layers"] * block + width
    projector = merged * merged + merged * config.hidden_size + config.hidden_size
    return int(tower + projector)
