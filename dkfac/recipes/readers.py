"""Pictures with labels from what data sets come in: idx files, CIFAR's batches, folders and archives of images."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")

LAYOUT = """put there one of
  train/<class>/*.jpg and test/<class>/*.jpg (or val/), as folders or in one .tar, .tar.gz or .tar.xz archive
  data_batch_1 ... data_batch_5 and test_batch (CIFAR-10's python version)
  train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .gz)"""


@dataclass(frozen=True, slots=True)
class Pictures:
    """One split: labels, and pixels in memory or where to get them."""

    labels: Tensor
    """``[N]``"""
    classes: tuple[str, ...]
    pixels: Tensor | None = None
    """``[N, C, H, W]``, uint8."""
    sources: tuple[Path | bytes, ...] = ()
    """Otherwise: files of images, or their contents."""
    size: int | None = None
    """What those are brought to."""

    def __len__(self) -> int:
        return len(self.labels)

    def sized(self, size: int | None) -> Pictures:
        """Return the same, brought to a size if they are not in memory."""
        return replace(self, size=size)

    def get(self, index: Tensor, *, seed: int | None) -> tuple[Tensor, Tensor]:
        """Return pixels ``[n, C, size, size]``, uint8, and labels. ``seed``: cut random parts (area 8 to 100%, aspect
        3/4 to 4/3), as for training; None: the middle. Pictures in memory come as they are."""
        return self._load(index, seed), self.labels[index]

    def _load(self, index: Tensor, seed: int | None) -> Tensor:
        if self.pixels is not None:
            return self.pixels[index]
        size = self.size
        if size is None:
            raise ValueError("pictures of different sizes need a size to be brought to")
        with ThreadPoolExecutor(8) as pool:
            numbers = index.tolist()
            seeds = [None if seed is None else hash((seed, i)) for i in numbers]
            return torch.stack(list(pool.map(lambda i, s: _decode(self.sources[i], size, s), numbers, seeds)))


def read(path: str | Path) -> tuple[Pictures, Pictures]:
    """Return training and test pictures of whatever is at a path."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no data at {path}: {LAYOUT}")
    if path.is_file():
        if not path.name.endswith(ARCHIVES):
            raise ValueError(f"{path} is not an archive ({', '.join(ARCHIVES)}): {LAYOUT}")
        return _splits(_members(path), str(path))
    names = {child.name for child in path.iterdir()}
    if "data_batch_1" in names or "cifar-10-batches-py" in names:
        return _cifar(path if "data_batch_1" in names else path / "cifar-10-batches-py")
    if any(name.startswith("train-images-idx3") for name in names):
        return _idx_split(path, "train"), _idx_split(path, "t10k")
    files = ((child.relative_to(path).parts, child) for child in sorted(path.rglob("*")) if child.is_file())
    return _splits(files, str(path))


def _members(path: Path) -> Iterable[tuple[tuple[str, ...], bytes]]:
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield PurePosixPath(member.name).parts, file.read()


def _splits(files: Iterable[tuple[tuple[str, ...], Path | bytes]], where: str) -> tuple[Pictures, Pictures]:
    """Sort files by ``.../<split>/<class>/<name>``."""
    found: dict[str, list[tuple[str, str, Path | bytes]]] = {"train": [], "test": []}
    for parts, source in files:
        if len(parts) < 3 or not parts[-1].lower().endswith(SUFFIXES):
            continue
        for split, names in SPLITS.items():
            if parts[-3].lower() in names:
                found[split].append((parts[-2], parts[-1], source))
    missing = [split for split, items in found.items() if not items]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)} pictures: {LAYOUT}")
    classes = tuple(sorted({name for name, _, _ in found["train"]}))
    strangers = {name for name, _, _ in found["test"]} - set(classes)
    if strangers:
        raise ValueError(f"{where} has test pictures of classes without training pictures: {sorted(strangers)[:5]}")
    result = []
    for items in found.values():
        items.sort(key=lambda item: item[:2])
        labels = torch.tensor([classes.index(name) for name, _, _ in items])
        result.append(_in_memory(Pictures(labels, classes, sources=tuple(source for _, _, source in items))))
    return result[0], result[1]


SMALL = 64
"""Pictures up to this size are decoded once and kept, if the first and the last are of one size."""


def _in_memory(pictures: Pictures) -> Pictures:
    sizes = {_open(source).size for source in (pictures.sources[0], pictures.sources[-1])}
    if len(sizes) > 1 or max(next(iter(sizes))) > SMALL:
        return pictures
    with ThreadPoolExecutor(8) as pool:
        pixels = torch.stack(list(pool.map(lambda source: _pixels(_open(source)), pictures.sources)))
    return Pictures(pictures.labels, pictures.classes, pixels)


def _open(source: Path | bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("reading images needs Pillow: pip install 'dkfac[recipes]'") from error
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source).convert("RGB")
    except OSError as error:
        what = "a member of the archive" if isinstance(source, bytes) else str(source)
        raise ValueError(f"{what} cannot be read as an image ({error}): remove it or get it again") from error


def _pixels(image: Any) -> Tensor:
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def _decode(source: Path | bytes, size: int, seed: int | None) -> Tensor:
    """Return a random part, or the middle, of an image as ``[3, size, size]``."""
    image = _open(source)
    box = _middle(image.width, image.height, size) if seed is None else _part(image.width, image.height, seed)
    return _pixels(image.resize((size, size), 2, box))  # 2: bilinear


def _middle(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return what is left of an image whose shorter side is made 256/224 of the size, cut to the size."""
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


def _cifar(folder: Path) -> tuple[Pictures, Pictures]:
    """Read CIFAR-10's python batches: pickled dicts of plain arrays, loaded with nothing else allowed."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    train = [_cifar_batch(folder / name) for name in names]
    pixels, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    classes = tuple(str(i) for i in range(int(labels.max()) + 1))
    test_pixels, test_labels = _cifar_batch(folder / "test_batch")
    return Pictures(labels, classes, pixels), Pictures(test_labels, classes, test_pixels)


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    if not path.exists():
        raise ValueError(
            f"{path} is missing: CIFAR-10's python version has data_batch_1 ... data_batch_5 and test_batch"
        )
    try:
        body = _Plain(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels = torch.from_numpy(body[b"data"].copy()).view(-1, 3, 32, 32)
        return pixels, torch.tensor(body[b"labels"])
    except (pickle.UnpicklingError, KeyError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is not a batch of CIFAR-10's python version ({error}): get it again") from error


class _Plain(pickle.Unpickler):
    """Reads arrays and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype")
        if plain or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _idx_split(folder: Path, prefix: str) -> Pictures:
    pixels = read_idx(_one_of(folder, f"{prefix}-images-idx3-ubyte"), 3)
    labels = read_idx(_one_of(folder, f"{prefix}-labels-idx1-ubyte"), 1).long()
    if len(pixels) != len(labels):
        raise ValueError(f"{folder} has {len(pixels)} {prefix} images and {len(labels)} labels: get both again")
    return Pictures(labels, tuple(str(i) for i in range(int(labels.max()) + 1)), pixels.unsqueeze(1))


def _one_of(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise ValueError(f"{folder} has no {name} nor {name}.gz: {LAYOUT}")


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Return an idx file of bytes, ``[N, ...]``."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        content: bytes = file.read()
    if len(content) < 4 + 4 * num_dims or content[:3] != b"\0\0\x08" or content[3] != num_dims:
        raise ValueError(f"{path} is not an idx file of bytes with {num_dims} dimensions: get it again")
    shape = struct.unpack(f">{num_dims}I", content[4 : 4 + 4 * num_dims])
    flat = torch.frombuffer(bytearray(content[4 + 4 * num_dims :]), dtype=torch.uint8)
    if flat.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} says {shape} and holds {flat.numel()} bytes: it was cut short; get it again")
    return flat.view(shape)
