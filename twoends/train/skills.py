"""What a trained model can do on held-out tasks: the answers whose every token is its first choice."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import tiktoken
import torch

from twoends.train.model import KimiK3

# Task -> where an answer begins (end of group 1) and what it is (group 2), in the text of a document.
ANSWERS = {
    "addition": re.compile(r"(^\d+ \+ \d+ =)( \d+)$", re.MULTILINE),
    "subtraction": re.compile(r"(^\d+ - \d+ =)( \d+)$", re.MULTILINE),
    "word problem": re.compile(r"(^Answer: \w+ had)( \d+) ", re.MULTILINE),
    "what does X have": re.compile(r"(What does \w+ have\? \w+ has)( the [^.]+)\."),
    "who has X": re.compile(r"(Who has the [^?]+\?)( \w+) has"),
    "counting on": re.compile(r"(^Count: (?:\d+, ){3}\d+,)( .+)$", re.MULTILINE),
    "say again": re.compile(r"(^Again:)( .+)$", re.MULTILINE),
    "sort by letter": re.compile(r"(^Sorted:)( .+)$", re.MULTILINE),
}


def answer_spans(text: str) -> Iterable[tuple[str, str, str]]:
    """Every answer of a document: the task, the text before it, the answer."""
    for task, pattern in ANSWERS.items():
        for match in pattern.finditer(text):
            yield task, text[: match.start(2)], match[2]


@torch.no_grad()
def answered(
    model: KimiK3, documents: Iterable[str], *, encoder: tiktoken.Encoding, per_task: int
) -> dict[str, tuple[int, int]]:
    """(right, asked) per task, at most `per_task` asked of each. Earlier answers stand in the text."""
    model.eval()
    tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for text in documents:
        for task, before, answer in answer_spans(text):
            if tally[task][1] >= per_task:
                continue
            prefix, wanted = encoder.encode_ordinary(before), encoder.encode_ordinary(answer)
            logits = model(torch.tensor([[*prefix, *wanted]]))[0]
            chosen = logits[len(prefix) - 1 : -1].argmax(-1).tolist()
            tally[task][0] += chosen == wanted
            tally[task][1] += 1
    return {task: (right, asked) for task, (right, asked) in tally.items()}
