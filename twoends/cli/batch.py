"""`twoends batch`: many requests from a file, answered in shared passes over the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from twoends.cli.command import JSON, Argument, Command, Option, Values
from twoends.cli.options import (
    CHUNK,
    CONTEXT,
    EXPERT_ACTIVATIONS,
    KERNELS,
    LATENT_EPS,
    RAM,
    SEQUENCES,
    SOURCE,
    THREADS,
)
from twoends.cli.screen import Screen


def command() -> Command:
    """The description of `batch`."""
    return Command(
        name="batch",
        phrase="answer a file of requests, each weight read once for all",
        about=(
            "INPUT has one request a line in OpenAI's batch format: custom_id, method POST, url "
            "/v1/completions, and a body with prompt (text or token ids), max_tokens, temperature, top_p, "
            "top_k, seed, stop, n (1 only), model. What a body leaves out is as in 'run': greedy, 64 "
            "tokens. OUTPUT gets one answer a line as they are done. Each is that of a run of its own, bit "
            "for bit. A request that can't be done is answered with its error and the rest goes on. "
            "Stopped at any point, the same command does what is missing."
        ),
        arguments=(
            Argument(name="MODEL", help="a checkpoint's or a pack's directory; left out, the one that ships"),
            Argument(name="INPUT", help="the requests, a JSON object a line", required=True),
            Argument(name="OUTPUT", help="the answers; new, or those of this batch so far", required=True),
        ),
        options=(
            RAM,
            replace(SEQUENCES, help="requests that share each pass (the number with fewest bytes a token)"),
            THREADS,
            replace(CHUNK, help="rows in one pass, of prompts and texts together (from the budget)"),
            replace(CONTEXT, help="room for a request and its answer, in tokens (what the largest needs)"),
            Option(
                flag="--policy",
                choices=("decayed", "lru"),
                default="decayed",
                help="which expert gives way: decayed frequency (default) or least recently used",
            ),
            Option(flag="--trace", value="FILE", convert=Path, help="write each read, hit and wait to FILE"),
            EXPERT_ACTIVATIONS,
            LATENT_EPS,
            SOURCE,
            KERNELS,
            Option(flag="--no-direct", help="read through the page cache (without O_DIRECT)"),
            JSON,
        ),
        examples=(
            "twoends batch requests.jsonl answers.jsonl",
            "twoends batch /data/kimi-k3 requests.jsonl answers.jsonl --ram 16GB",
        ),
        act=_act,
    )


def _act(values: Values, screen: Screen) -> None:
    # The engine and numpy are loaded here, so that help is fast.
    from twoends.cli.batch_model import batch

    batch(values, screen)
