"""The tensors of a draft layer: read whole and checked, or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twoends.checkpoint.config import ModelConfig
from twoends.checkpoint.draft_config import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    DraftConfig,
    check_tensors,
    draft_config_text,
    draft_specs,
    layer_config,
    read_draft_config,
)
from twoends.checkpoint.layout import TensorPlan, plan_shard
from twoends.checkpoint.names import TensorSpec
from twoends.checkpoint.safetensors import ShardHeader, read_header
from twoends.checkpoint.writer import ShardWriter, write_text
from twoends.errors import CheckpointError
from twoends.kernels.ops import F32, Bytes, Matrix

# Values; a check of a whole matrix would hold it twice more.
_CHECKED_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFile:
    """A draft layer whose header was read and found right; no weight was read yet. `layer` is its shape."""

    directory: Path
    config: DraftConfig
    layer: ModelConfig
    header: ShardHeader
    specs: tuple[TensorSpec, ...]

    @classmethod
    def open(cls, directory: Path, target: ModelConfig) -> DraftFile:
        """Raises ConfigError and CheckpointError for anything that is not as it should be."""
        config = read_draft_config(directory)
        header = read_header(directory / WEIGHTS_NAME)
        specs = draft_specs(config, target)
        found = dict(zip(header.names, zip(header.dtypes, header.shapes, strict=True), strict=True))
        check_tensors(header.path, found, specs)
        layer = layer_config(config, target)
        return cls(directory=directory, config=config, layer=layer, header=header, specs=specs)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights when they are read."""
        return sum(spec.nbytes for spec in self.specs)

    def read(self) -> DraftTensors:
        """Every tensor. Raises CheckpointError for one that holds a value that isn't finite."""
        places = dict(zip(self.header.names, self.header.begins.tolist(), strict=True))
        found = DraftTensors(matrices={}, vectors={})
        with self.header.path.open("rb") as file:
            for spec in self.specs:
                file.seek(places[spec.file_name])
                data = np.fromfile(file, np.uint8, spec.nbytes)
                if data.size != spec.nbytes:
                    raise CheckpointError(f"{self.header.path} became shorter while it was read.")
                _refuse_not_finite(self.header.path, spec, data)
                if spec.released == "F32":
                    found.vectors[spec.short] = data.view(np.float32)
                else:
                    rows, cols = spec.shape
                    found.matrices[spec.short] = Matrix(format="bf16", rows=rows, cols=cols, data=data)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTensors:
    """Matrices and norms by their short names."""

    matrices: dict[str, Matrix]
    vectors: dict[str, F32]


def write_draft(
    directory: Path,
    config: DraftConfig,
    target: ModelConfig,
    *,
    tensors: Mapping[str, NDArray[Any]],
    card: str,
) -> None:
    """Writes the folder; config.json comes last. `tensors` are by file name, F32 or the bits of BF16.

    Raises CheckpointError for a tensor of another shape, or one that isn't finite.
    """
    specs = draft_specs(config, target)
    path = directory / WEIGHTS_NAME
    given = {
        name: ("F32" if array.dtype == np.float32 else "BF16", array.shape) for name, array in tensors.items()
    }
    check_tensors(path, given, specs)
    for spec in specs:
        _refuse_not_finite(path, spec, tensors[spec.file_name].reshape(-1).view(np.uint8))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).unlink(missing_ok=True)
    plans = [TensorPlan(name=spec.file_name, dtype=spec.released, shape=spec.shape) for spec in specs]
    with ShardWriter(directory, plan_shard(WEIGHTS_NAME, plans)) as shard:
        for spec in specs:
            shard.write(spec.file_name, tensors[spec.file_name])
    write_text(directory / "README.md", card)
    write_text(directory / CONFIG_NAME, draft_config_text(config))


def _refuse_not_finite(path: Path, spec: TensorSpec, data: Bytes) -> None:
    wide = spec.released == "F32"
    values: NDArray[Any] = data.view(np.uint32 if wide else np.uint16)
    for begin in range(0, len(values), _CHECKED_AT_ONCE):
        exponents = values[begin : begin + _CHECKED_AT_ONCE] >> (23 if wide else 7) & 0xFF
        wrong = np.flatnonzero(exponents == 0xFF)
        if wrong.size:
            raise CheckpointError(
                f"{spec.file_name} of {path.name} holds a value that isn't finite.",
                evidence=[
                    ("file", str(path)),
                    ("first", f"value {begin + int(wrong[0]):,} of {len(values):,}"),
                ],
                remedies=["Nothing of it is used. Export the draft again, or run without --draft-model."],
            )
