"""Options that several commands have, each said once."""

from __future__ import annotations

from pathlib import Path

from twoends.cli.command import Option, real_number, whole_number
from twoends.errors import OptionError
from twoends.units import parse_bytes

RAM = Option(
    flag="--ram",
    value="SIZE",
    convert=parse_bytes,
    help="memory of the whole process, like 8GB or 600MB (80 % of what is available)",
)
THREADS = Option(
    flag="--threads",
    value="N",
    convert=whole_number(least=1),
    help="threads that compute (all cores that this process may use)",
)
CHUNK = Option(
    flag="--chunk",
    value="N",
    convert=whole_number(least=1),
    help="prompt tokens in one pass over the weights (from the budget, 64 at most)",
)
DRAFT = Option(
    flag="--draft",
    value="N",
    convert=whole_number(least=0),
    default=0,
    help="verify up to N guessed ids at once, guessed from the text so far (0, none)",
)
DRAFT_FROM = Option(
    flag="--draft-from",
    value="FILE",
    convert=Path,
    help="guess also from the text of this saved session, like an earlier answer to the same question",
)
DRAFT_MODEL = Option(
    flag="--draft-model",
    value="DIR",
    convert=Path,
    help=(
        "what guesses where the text so far suggests nothing: a smaller model with the same tokenizer, or a "
        "layer that train --draft-of made for this model (nano-draft: the one that ships)"
    ),
)
LOOK_AHEAD = Option(
    flag="--look-ahead",
    choices=("auto", "on", "off"),
    default="auto",
    help="read experts before they are asked for: those that the next layer's router is likely to choose, "
    "or all where all have room; where it pays, always, never",
)
PROFILE = Option(
    flag="--profile",
    value="FILE",
    convert=Path,
    help="which experts were popular in another run, and how often a slot was of use",
)
SEQUENCES = Option(
    flag="--sequences",
    value="N",
    convert=whole_number(least=1),
    help="sequences that share each pass over the weights (1)",
)
CONTEXT = Option(
    flag="--context",
    value="N",
    convert=whole_number(least=1),
    help="room for this many tokens (what this run needs)",
)
LATENT_EPS = Option(
    flag="--latent-eps",
    value="X",
    convert=real_number,
    help="epsilon of the norms inside MLA, where another engine's is to be matched (1e-6)",
)
EXPERT_ACTIVATIONS = Option(
    flag="--expert-activations",
    choices=("f32", "mxfp8"),
    default="f32",
    help="inputs of MXFP4 experts as they are, or rounded to MXFP8 as in K3's fine-tuning (f32)",
)
KERNELS = Option(
    flag="--kernels",
    choices=("native", "reference"),
    help="C++ kernels, or the numpy ones that define them (native where built)",
)
SOURCE = Option(
    flag="--source",
    value="DIR",
    convert=Path,
    help="where the checkpoint of a pack is now (where it was when it was packed)",
)


def ids_of(word: str) -> list[int]:
    """ "1,2,3" as token ids."""
    parts = [part.strip() for part in word.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise OptionError(
            f"'{word}' is not a list of token ids.", remedies=["Write whole numbers:  --ids 1,2,3"]
        )
    return [int(part) for part in parts]
