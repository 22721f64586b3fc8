"""A small tokenizer for synthetic checkpoints, in the form of the release: rank file and config.

Ranks 0..255 are the single bytes in the release's order, so any bytes can be encoded. Then come
prefixes of frequent English words, letter pairs and numbers, until there are as many ranks as
wanted; each token is an earlier token and one more byte, so that byte pair merging can reach it.
The 256 special tokens follow the ranks, the sixteen named ones at the release's places.
"""

from __future__ import annotations

import base64
import itertools
import json
import string
from collections.abc import Iterator
from typing import Any

from twoends.checkpoint.presets import NUM_SPECIALS

_WORDS = """
the of and to in a is that for it was on with as his he be at by had not are but from or have an
they which one you were her all she there would their we him been has when who will more no if out
so said what up its about into than them can only other new some could time these two may then do
first any my now such like our over man me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take
three capital France Paris river water light night house small found thought again place every part
"""
# Name, place after the ranks, and whether it is special in the release's sense.
SPECIALS = (
    ("[BOS]", 0, True),
    ("[EOS]", 1, True),
    ("<|end_of_msg|>", 2, True),
    ("<|open|>", 3, False),
    ("<|close|>", 4, False),
    ("<|sep|>", 5, False),
    ("[start_header_id]", 6, True),
    ("[end_header_id]", 7, True),
    ("[EOT]", 9, True),
    ("<|media_begin|>", 18, True),
    ("<|media_content|>", 19, True),
    ("<|media_end|>", 20, True),
    ("<|media_pad|>", 21, True),
    ("<osagent_mode>", 65, True),
    ("[UNK]", 254, True),
    ("[PAD]", 255, True),
)
_NOT_ADDITIONAL = {"[BOS]", "[EOS]", "[UNK]", "[PAD]", "<|open|>", "<|close|>", "<|sep|>"}


def rank_file(vocab_size: int) -> str:
    """The text of tiktoken.model for `vocab_size` ids, the 256 special ones included."""
    lines = []
    for rank, token in enumerate(tokens(vocab_size - NUM_SPECIALS)):
        lines.append(f"{base64.b64encode(token).decode('ascii')} {rank}\n")
    return "".join(lines)


def tokens(num_ranks: int) -> list[bytes]:
    """The tokens in the order of their ranks; at least 256."""
    if num_ranks < 256:
        raise ValueError(f"a rank file needs at least 256 tokens, not {num_ranks}")
    found = dict.fromkeys(bytes([byte]) for byte in _byte_order())
    for candidate in _candidates():
        if len(found) == num_ranks:
            break
        if candidate[:-1] in found:
            found[candidate] = None
    return list(found)


def tokenizer_config(vocab_size: int) -> dict[str, Any]:
    """The object of tokenizer_config.json."""
    ranks = vocab_size - NUM_SPECIALS
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(ranks + place): {"content": name, **plain, "special": special}
            for name, place, special in SPECIALS
        },
        "additional_special_tokens": [name for name, _, _ in SPECIALS if name not in _NOT_ADDITIONAL],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


def generation_config(eos_id: int | None) -> str:
    """The text of generation_config.json, in the release's form."""
    return json.dumps({"max_length": 1 << 20, "eos_token_id": eos_id}, indent=2)


def _byte_order() -> list[int]:
    """Printable characters of Latin-1 first, then the rest: the order that byte-level BPE began with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return shown + [byte for byte in range(256) if byte not in set(shown)]


def _candidates() -> Iterator[bytes]:
    """More than a million tokens, the likely ones first."""
    for word in _WORDS.split():
        for form in (f" {word}", word):
            for length in range(2, len(form) + 1):
                yield form[:length].encode("ascii")
    letters = string.ascii_lowercase
    for digits in range(2, 4):
        yield from (f"{number:0{digits}d}".encode("ascii") for number in range(10**digits))
    for length in range(2, 6):
        for prefix in ("", " "):
            for text in itertools.product(letters, repeat=length - 1):
                yield (prefix + "".join(text)).encode("ascii")
