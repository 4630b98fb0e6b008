"""All recipes by name.

Input: the name of a recipe. Output: the recipe, or an error with the closest name. Owns: the table of recipes.
"""

from __future__ import annotations

import difflib

from dkfac.tools.recipes import autoencoder, char_gpt, digits_cnn, fashion_cnn, large_batch
from dkfac.tools.recipes.pictures_resnet import CIFAR, IMAGENET
from dkfac.tools.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        digits_cnn.DIGITS_CNN,
        autoencoder.AUTOENCODER,
        char_gpt.CHAR_GPT,
        fashion_cnn.FASHION_CNN,
        CIFAR,
        *IMAGENET,
        large_batch.LARGE_BATCH,
    )
}


def find_recipe(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECIPES)}"
    raise ValueError(f"there is no recipe {name!r}; {hint}")
