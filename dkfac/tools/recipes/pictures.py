"""Labelled images, held in memory or decoded on demand.

Input: files or pixels, labels. Output: batches of uint8 pixels. Owns: nothing but the images in memory.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 64
"""Images with at most this many pixels per side are decoded once and kept, if all have the same size."""


class Member(NamedTuple):
    """An image in an archive."""

    name: str
    content: bytes


Source = Path | Member


@dataclass(frozen=True, slots=True)
class Pictures:
    """One split: labels, and either pixels in memory or the files to decode."""

    labels: Tensor
    """``[N]``"""
    classes: tuple[str, ...]
    pixels: Tensor | None = None
    """``[N, C, H, W]``, uint8."""
    sources: tuple[Source, ...] = ()
    """The files or archive members to decode, if there are no pixels in memory."""
    size: int | None = None
    """Pixels per side that images are resized to; None: images in memory are not resized."""

    def __len__(self) -> int:
        return len(self.labels)

    def sized(self, size: int | None) -> Pictures:
        """Return the same images, to be resized to ``size``."""
        if size is None and self.pixels is None:
            raise ValueError(self._wants_size())
        return replace(self, size=size)

    def in_colour(self) -> Pictures:
        """Return the same images with three channels; grey images get three equal ones."""
        return self if self.pixels is None else replace(self, pixels=self.pixels.expand(-1, 3, -1, -1))

    def get(self, index: Tensor, *, seed: int | None) -> tuple[Tensor, Tensor]:
        """Return pixels ``[n, C, size, size]``, uint8, and labels.

        ``seed``: take random crops for training (area 8 to 100%, aspect ratio 3/4 to 4/3); None: the center crop.
        Images in memory are never cropped.
        """
        return self._load(index, seed), self.labels[index]

    def _load(self, index: Tensor, seed: int | None) -> Tensor:
        if self.pixels is not None:
            return _resized(self.pixels[index], self.size)
        size = self.size
        if size is None:
            raise ValueError(self._wants_size())
        with ThreadPoolExecutor(8) as pool:
            numbers = index.tolist()
            seeds = [None if seed is None else hash((seed, i)) for i in numbers]
            return torch.stack(list(pool.map(lambda i, s: _decode(self.sources[i], size, s), numbers, seeds)))

    def _wants_size(self) -> str:
        """Return an error message: why the images need a size, and how to set it."""
        first, remedy = self.sources[0], "set the size to resize them to, for example --size 32"
        size = _size(first)
        odd = next((source for source in self.sources if _size(source) != size), None)
        if odd is None:
            return f"the images have {size[0]} x {size[1]} pixels, more than {SMALL}: {remedy}"
        sizes = ", ".join("{} has {} x {} pixels".format(_name(one), *_size(one)) for one in (first, odd))
        return f"the images differ in size ({sizes}): {remedy}"


def in_memory(pictures: Pictures) -> Pictures:
    """Return the images decoded into memory, if they are small and all of one size."""
    sizes = {
        _size(source) for source in (pictures.sources[0], pictures.sources[-1])
    }  # check only two: there may be millions
    if len(sizes) > 1 or max(next(iter(sizes))) > SMALL:
        return pictures
    with ThreadPoolExecutor(8) as pool:
        pixels = list(pool.map(lambda source: _pixels(_open(source)), pictures.sources))
    if len({each.shape for each in pixels}) > 1:
        return pictures
    return Pictures(pictures.labels, pictures.classes, torch.stack(pixels))


def _open(source: Source) -> Any:
    return _image(source, lambda image: image.convert("RGB"))


def _size(source: Source) -> tuple[int, int]:
    """Return width and height without decoding the image."""
    size: tuple[int, int] = _image(source, lambda image: image.size)
    return size


def _image(source: Source, take: Callable[[Any], Any]) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("reading images needs Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(source.content) if isinstance(source, Member) else source) as image:
            return take(image)
    except Exception as error:  # Pillow's decoders raise exceptions of any type
        what = f"{_name(source)} cannot be read as an image ({error})"
        raise ValueError(f"{what}: remove it or download it again") from error


def _name(source: Source) -> str:
    return source.name if isinstance(source, Member) else str(source)


def _resized(pixels: Tensor, size: int | None) -> Tensor:
    """Return the center squares of images in memory, resized to ``size``."""
    if size is None:
        return pixels
    side = min(pixels.shape[2:])
    top, left = ((length - side) // 2 for length in pixels.shape[2:])
    middle = pixels[:, :, top : top + side, left : left + side]
    return F.interpolate(middle, (size, size), mode="bilinear", antialias=True)


def _pixels(image: Any) -> Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def _decode(source: Source, size: int, seed: int | None) -> Tensor:
    """Return a random crop, or the center crop, of an image as ``[3, size, size]``."""
    image = _open(source)
    box = _middle(image.width, image.height, size) if seed is None else _part(image.width, image.height, seed)
    return _pixels(image.resize((size, size), 2, box))  # 2: bilinear


def _middle(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the box of the center crop: as if the shorter side were resized to 256/224 of the size, then cropped."""
    side = min(width, height) * 224 / 256 if size > SMALL else float(min(width, height))
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _part(width: int, height: int, seed: int) -> tuple[float, float, float, float]:
    numbers = random.Random(seed)
    for _ in range(10):
        area = width * height * numbers.uniform(0.08, 1.0)
        aspect = (3 / 4) ** numbers.uniform(-1, 1)
        w, h = (area * aspect) ** 0.5, (area / aspect) ** 0.5
        if w <= width and h <= height:
            left, top = numbers.uniform(0, width - w), numbers.uniform(0, height - h)
            return left, top, left + w, top + h
    return _middle(width, height, SMALL)
