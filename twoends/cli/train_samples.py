"""Text during training: the engine, in a process of its own, on the checkpoint as it is now."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twoends.cli.screen import Screen

_TOKENS, _TEMPERATURE, _SEED = 60, 0.6, 7
_TIMEOUT_S = 300


def engine_samples(directory: Path, prompts: Sequence[str], *, screen: Screen) -> list[dict[str, Any]]:
    """What `twoends run` writes after each prompt; a run that fails is told and left out.

    A process of its own: the engine's memory is not torch's, and Ctrl-C is meant for the training.
    """
    samples = []
    for prompt in prompts:
        words = [
            sys.executable, "-m", "twoends", "run", "-n", str(_TOKENS), "--temperature", str(_TEMPERATURE),
            "--seed", str(_SEED), "--threads", "1", "--json", "--", str(directory), prompt,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            screen.note(f"  no sample: the engine wrote nothing within {_TIMEOUT_S} s")
            continue
        if done.returncode != 0:
            screen.note(
                f"  no sample: {done.stderr.strip().splitlines()[0] if done.stderr else 'no reason told'}"
            )
            continue
        text = json.loads(done.stdout)["text"]
        screen.note(f"  {prompt}|{' '.join(text.split())}")
        samples.append({"prompt": prompt, "text": text})
    return samples
