"""Twoends runs and trains models of the Kimi K3 family from both ends.

The life of a token: safetensors bytes -> budget -> store -> layer -> forward -> sampler -> stream.
docs/story.md walks it with a paragraph for each step.
"""

from __future__ import annotations

__version__ = "0.1.0"
