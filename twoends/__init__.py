"""Twoends runs and trains models of the Kimi K3 family from both ends.

The life of a token: safetensors bytes -> budget -> store -> layer -> forward -> sampler -> stream.
docs/story.md walks it with a paragraph for each step.

    open_model   a checkpoint within a memory budget; model.generate(...) continues a text
    Sampling     how the next token is chosen; the default is greedy
    errors       every exception, and what each means
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twoends import errors

if TYPE_CHECKING:
    from twoends.api import Model, open_model
    from twoends.generate.sampler import Sampling

__all__ = ["Model", "Sampling", "__version__", "errors", "open_model"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the engine when it is first asked for, so that `import twoends` stays light."""
    if name in ("Model", "open_model"):
        from twoends import api

        return getattr(api, name)
    if name == "Sampling":
        from twoends.generate.sampler import Sampling

        return Sampling
    raise AttributeError(f"module 'twoends' has no attribute '{name}'")
