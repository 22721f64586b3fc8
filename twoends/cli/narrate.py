"""What `run` says on stderr before the first token: the model, and every choice with its reason."""

from __future__ import annotations

from twoends.checkpoint.config import ModelConfig
from twoends.cli.command import Values
from twoends.cli.screen import Screen, facts, plural
from twoends.engine.budget import Plan
from twoends.engine.files import WeightFiles
from twoends.engine.open import Checkpoint
from twoends.generate.tokenizer_files import RANK_FILE
from twoends.kernels.choose import Choice
from twoends.units import format_bytes

FAMILY_NAMES = {"kimi-k3": "Kimi K3", "kimi-linear": "Kimi-Linear"}


def model_line(config: ModelConfig, total_bytes: int) -> str:
    """ "Kimi K3   93 layers (69 KDA, 24 MLA)   1.56 TB"."""
    kinds = f"({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA)"
    name = FAMILY_NAMES[config.family]
    return f"{name}   {plural(config.num_layers, 'layer')} {kinds}   {format_bytes(total_bytes)} on disk"


def say_what_runs(
    checkpoint: Checkpoint,
    plan: Plan,
    choice: Choice,
    files: WeightFiles,
    *,
    values: Values,
    screen: Screen,
) -> None:
    """A heading, then one line for each choice that changes speed or memory."""
    heading = model_line(checkpoint.config, checkpoint.index.total_bytes)
    screen.note(f"{heading}   budget {format_bytes(plan.ram_bytes)}")
    rows = [
        ("model", str(checkpoint.directory)),
        *choice.reasons,
        ("reads", files.reason),
        ("experts", _experts(plan, values.policy)),
    ]
    if plan.num_sequences > 1:
        share = f"{plan.num_sequences} at most share a pass, {plural(plan.chunk_tokens, 'row')} of them"
        rows.append(("sequences", share))
    if checkpoint.index.vision_tensors:
        count, size = checkpoint.index.vision_tensors, format_bytes(checkpoint.index.vision_bytes)
        rows.append(("vision", f"{plural(count, 'tensor')} ({size}) not used: text only"))
    if not (checkpoint.directory / RANK_FILE).exists():
        rows.append(("text", f"this checkpoint has no {RANK_FILE}: ids only"))
    is_greedy = "temperature" in values and values.temperature == 0
    idle = sorted({"seed", "top_p", "top_k"} & set(values.given)) if is_greedy else []
    if idle:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in idle)
        rows.append(("note", f"{flags} without effect: --temperature is 0 (greedy)"))
    for line in facts(rows):
        screen.note(line)
    screen.note()


def _experts(plan: Plan, policy: str) -> str:
    if not plan.num_slots:
        return "none in this model"
    return f"{plural(plan.num_slots, 'slot')}, {plan.experts_per_pass:,} chosen per token, policy {policy}"
