"""Small image folders: each class has a colour of its own."""

from pathlib import Path

import numpy
from PIL import Image


def write_folder(folder, *, sizes, number, classes=3, suffix="jpg", test="val"):
    """Write ``train`` and a test split, a picture of each size in turn (width, height)."""
    random = numpy.random.default_rng(0)
    for split, count in (("train", number), (test, number // 2)):
        for c in range(classes):
            place = Path(folder) / split / f"class{c}"
            place.mkdir(parents=True)
            for i in range(count):
                width, height = sizes[i % len(sizes)]
                pixels = random.integers(0, 80, (height, width, 3)).astype("uint8")
                pixels[..., c % 3] += 120
                Image.fromarray(pixels).save(place / f"{i}.{suffix}")
