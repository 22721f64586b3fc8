"""Simple English stories and small tasks, generated: no source text, so no licence question.

One seed and one index give one document, whatever was generated before. Words and plots are data
(`story_words.toml`, `story_plots.toml`); this file only fills them in.
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

_CHOICE = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
_HE = {"he": "he", "him": "him", "his": "his", "himself": "himself"}
_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
_WOMEN = frozenset({"mother", "grandmother", "aunt", "big sister"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryBook:
    """The word lists and plots, read once."""

    words: dict[str, list[str]]
    plots: dict[str, dict[str, Any]]


def load_story_book() -> StoryBook:
    """Read the two data files beside this module."""
    folder = resources.files("twoends.train")
    words = tomllib.loads(folder.joinpath("story_words.toml").read_text(encoding="utf-8"))
    plots = tomllib.loads(folder.joinpath("story_plots.toml").read_text(encoding="utf-8"))
    return StoryBook(words=words, plots=plots)


def _person(rng: random.Random, words: dict[str, list[str]]) -> dict[str, str]:
    """A character: name, pronouns, an adjective and the noun phrase that introduces it."""
    adjective = rng.choice(words["child"])
    kind = rng.random()
    if kind < 0.35:
        name, noun, pronouns = rng.choice(words["girls"]), "girl", _SHE
    elif kind < 0.7:
        name, noun, pronouns = rng.choice(words["boys"]), "boy", _HE
    elif kind < 0.93:
        name, noun = rng.choice(words["beast_names"]), rng.choice(words["beasts"])
        pronouns = rng.choice([_HE, _SHE])
    else:
        noun, pronouns = rng.choice(words["jobs"]), rng.choice([_HE, _SHE])
        name = rng.choice(words["girls"] if pronouns is _SHE else words["boys"])
        adjective = rng.choice(["old", "young", "poor", "kind", "good"])
    return {"name": name, "kind": adjective, "phrase": f"a {adjective} {noun}", **pronouns}


def _other_person(rng: random.Random, words: dict[str, list[str]], taken: set[str]) -> dict[str, str]:
    while (person := _person(rng, words))["name"] in taken:
        pass
    taken.add(person["name"])
    return person


def _pair(rng: random.Random, items: list[str]) -> tuple[str, str]:
    first, second = rng.sample(items, 2)
    return first, second


def _facts(rng: random.Random, words: dict[str, list[str]]) -> dict[str, str]:
    """Everything a template may name, fixed for one story."""
    taken: set[str] = set()
    hero, friend, rival = (_other_person(rng, words, taken) for _ in range(3))
    place, place2 = _pair(rng, words["places"])
    job, job2 = _pair(rng, words["jobs"])
    fruit, family = rng.choice(words["fruits"]), rng.choice(words["family"])
    food, skill = rng.choice(words["foods"]), rng.choice(words["skills"])
    number = rng.choice(words["numbers"])
    plural = fruit[:-1] + "ies" if fruit.endswith("y") else fruit + ("es" if fruit.endswith("ch") else "s")
    facts = {
        "hero": hero["name"], "intro": f"{hero['phrase']} named {hero['name']}", "kind": hero["kind"],
        "friend": friend["name"], "f_kind": friend["phrase"],
        "rival": rival["name"], "r_kind": rival["phrase"],
        "place": place, "place2": place2, "job": job, "job2": job2, "family": family,
        "fruit": fruit, "fruit_s": plural, "food": food, "food_n": food.removeprefix("a big "),
        "skill": skill, "skill_do": skill, "number": number, "Number": number.capitalize(),
        "home": rng.choice(words["homes"]), "thing": rng.choice(words["things"]),
        "color": rng.choice(words["colors"]), "pet": rng.choice(words["pets"]),
        "beast2": rng.choice(words["beasts"]), "plant": rng.choice(words["plants"]),
        "weather": rng.choice(words["weathers"]), "day": rng.choice(words["days"]),
        "f_fam": "she" if family in _WOMEN else "he",
    }  # fmt: skip
    for prefix, person in (("", hero), ("f_", friend), ("r_", rival)):
        for key in ("he", "him", "his", "himself"):
            facts[prefix + key] = person[key]
        facts[f"{prefix}He"] = person["he"].capitalize()
        facts[f"{prefix}His"] = person["his"].capitalize()
    facts["day_low"] = facts["day"][0].lower() + facts["day"][1:]
    facts["said_who"] = f"said {hero['his']} {family}"
    return facts


def _fill(rng: random.Random, template: str, facts: dict[str, str]) -> str:
    """Choose every `[a|b]`, then put the facts in and mend `a apple`."""
    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    return _ARTICLE.sub(r"\1n ", text.format_map(facts))


def story(rng: random.Random, book: StoryBook) -> str:
    """One story of one or two plots with the same people, as paragraphs."""
    words, facts = book.words, _facts(rng, book.words)

    def say(templates: list[str]) -> str:
        return _fill(rng, rng.choice(templates), facts)

    opening = [say(words["openings"])]
    opening += [say(words["likes"]) for _ in range(rng.choice([0, 1, 1, 2]))]
    paragraphs = [" ".join(dict.fromkeys(opening))]
    names = rng.sample(sorted(book.plots), rng.choice([1, 1, 2]))
    for number, name in enumerate(names):
        plot = book.plots[name]
        if number:
            fresh = _facts(rng, words)
            kept = ("thing", "color", "fruit", "fruit_s", "food", "food_n", "place2", "skill", "skill_do")
            facts |= {key: fresh[key] for key in kept}
            facts["day"] = rng.choice(words["bridges"]).rstrip(",")
        beats = [say(beat) for beat in plot["beats"]]
        if rng.random() < 0.3:
            beats.insert(1, say(words["weather"]))
        cut = rng.randint(2, len(beats) - 2)
        paragraphs += [" ".join(beats[:cut]), " ".join(beats[cut:])]
    closing = [say(words["endings"])] if rng.random() < 0.8 else []
    if rng.random() < 0.4:
        closing.append(_fill(rng, words["lessons"][rng.choice(book.plots[names[-1]]["lessons"])], facts))
    if closing:
        paragraphs[-1] += " " + " ".join(closing)
    text = "\n\n".join(paragraphs)
    return text + _questions(rng, text, facts) if rng.random() < 0.15 else text


def _questions(rng: random.Random, text: str, facts: dict[str, str]) -> str:
    """One or two questions that the story answers, with the answers."""
    asked = [("Who is this story about?", f"It is about {facts['hero']}.")]
    if facts["home"] in text:
        asked.append((f"Where did {facts['hero']} live?", f"{facts['hero']} lived {facts['home']}."))
    if f"{facts['color']} {facts['thing']}" in text:
        asked.append((f"What color was the {facts['thing']}?", f"The {facts['thing']} was {facts['color']}."))
    if facts["friend"] in text:
        asked.append(
            (f"Who else is in the story besides {facts['hero']}?", f"{facts['friend']} is in it too.")
        )
    chosen = rng.sample(asked, min(len(asked), rng.choice([1, 1, 2])))
    return "".join(f"\n\nQuestion: {question}\nAnswer: {answer}" for question, answer in chosen)


def arithmetic(rng: random.Random, book: StoryBook) -> str:
    """A few sums in plain form, or one told as a little story, with the answer."""
    if rng.random() < 0.5:
        lines = []
        for _ in range(rng.randint(3, 8)):
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            if rng.random() < 0.5:
                lines.append(f"{a} + {b} = {a + b}")
            else:
                lines.append(f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")
        return "\n".join(lines)
    facts = _facts(rng, book.words)
    a, b = rng.randint(2, 12), rng.randint(1, 10)
    thing = facts["fruit_s"]
    if rng.random() < 0.5:
        middle, answer = f"{facts['friend']} gave {facts['him']} {b} more", a + b
    else:
        b = rng.randint(1, a - 1)
        middle, answer = f"{facts['He']} gave {b} to {facts['friend']}", a - b
    return (
        f"{facts['hero']} had {a} {thing}. {middle}. How many {thing} did {facts['hero']} have then?\n"
        f"Answer: {facts['hero']} had {answer} {thing}."
    )


def recall(rng: random.Random, book: StoryBook) -> str:
    """Who has what: a list of facts, then questions about some of them."""
    words = book.words
    names = rng.sample(words["girls"] + words["boys"], rng.randint(2, 6))
    colors, things = words["colors"], rng.sample(words["things"], len(names))
    held = {name: f"the {rng.choice(colors)} {thing}" for name, thing in zip(names, things, strict=True)}
    lines = [f"{name} has {thing}." for name, thing in held.items()]
    for name in rng.sample(names, rng.randint(1, len(names))):
        if rng.random() < 0.5:
            lines.append(f"What does {name} have? {name} has {held[name]}.")
        else:
            lines.append(f"Who has {held[name]}? {name} has {held[name]}.")
    return "\n".join(lines)


def lists(rng: random.Random, book: StoryBook) -> str:
    """Counting, copying and sorting: short sequences with their continuation."""
    kind = rng.randrange(3)
    if kind == 0:
        start, step = rng.randint(0, 50), rng.choice([1, 1, 2, 5, 10])
        return "Count: " + ", ".join(str(start + step * i) for i in range(rng.randint(5, 12))) + "."
    items = rng.sample(book.words["things"] + book.words["beasts"], rng.randint(3, 6))
    if kind == 1:
        return f"Say again: {', '.join(items)}.\nAgain: {', '.join(items)}."
    return f"Sort: {', '.join(items)}.\nSorted: {', '.join(sorted(items))}."


def echo(rng: random.Random, book: StoryBook) -> str:
    """Names that come again and again: lists said several times, pairs in another order, greetings.

    A story names its people once in thirty tokens; here a model learns within minutes to look a name up.
    """
    words = book.words
    names = rng.sample(words["girls"] + words["boys"] + words["beast_names"], rng.randint(3, 8))
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(["\n", " "]).join([", ".join(names) + "."] * rng.randint(2, 4))
    if kind == 1:
        pairs = [
            f"{name}: {thing}" for name, thing in zip(names, rng.sample(words["things"], 8), strict=False)
        ]
        shuffled = [pairs] + [rng.sample(pairs, len(pairs)) for _ in range(rng.randint(1, 2))]
        return "\n".join(", ".join(line) + "." for line in shuffled)
    facts = _facts(rng, words)
    lines = rng.sample(words["exchanges"], rng.randint(3, 7))
    return " ".join(_fill(rng, line, facts) for line in [rng.choice(words["meetings"]), *lines])


def document(seed: int, index: int, *, kind: str, book: StoryBook) -> str:
    """Document `index` of a kind (stories, echoes or tasks); depends on nothing but its arguments."""
    rng = random.Random(f"{kind}/{seed}/{index}")
    if kind == "stories":
        return story(rng, book)
    if kind == "tasks":
        return rng.choice([arithmetic, recall, recall, lists])(rng, book)
    if kind == "echoes":
        return echo(rng, book)
    raise ValueError(f"unknown kind of document {kind!r}; there are stories, echoes and tasks")
