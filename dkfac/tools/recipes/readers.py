"""Read labelled images from the formats of common data sets: idx files, CIFAR's batches, folders and tar archives.

Input: a path. Output: training and test ``Pictures``. Owns: nothing.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from dkfac.tools.recipes.pictures import Member, Pictures, Source, in_memory

SPLITS = {"train": ("train", "training"), "test": ("test", "val", "valid", "validation")}
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")

LAYOUT = """put one of these there:
  train/<class>/*.jpg and test/<class>/*.jpg (or val/), as folders or in one .tar, .tar.gz or .tar.xz archive
  data_batch_1 ... data_batch_5 and test_batch (CIFAR-10's python version)
  train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .gz)"""


def read_pictures(path: str | Path) -> tuple[Pictures, Pictures]:
    """Return the training and test images at a path, in any of the supported formats."""
    try:
        return _read(Path(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): check its permissions, or download it again") from error


def _read(path: Path) -> tuple[Pictures, Pictures]:
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
        return _numbered(_idx_split(path, "train"), _idx_split(path, "t10k"), path)
    files = ((child.relative_to(path).parts, child) for child in sorted(path.rglob("*")) if child.is_file())
    return _splits(files, str(path))


def _members(path: Path) -> Iterable[tuple[tuple[str, ...], Member]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield PurePosixPath(member.name).parts, Member(f"{path}: {member.name}", file.read())
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged, or not a tar archive: download it again") from error


def _splits(files: Iterable[tuple[tuple[str, ...], Source]], where: str) -> tuple[Pictures, Pictures]:
    """Sort files by ``.../<split>/<class>/<name>``. Hidden files (macOS's ``._0.jpg``) are ignored."""
    found: dict[str, list[tuple[str, str, Source]]] = {"train": [], "test": []}
    for parts, source in files:
        is_hidden = any(part.startswith(".") for part in parts[-3:])
        if len(parts) < 3 or is_hidden or not parts[-1].lower().endswith(_IMAGE_SUFFIXES):
            continue
        for split, names in SPLITS.items():
            if parts[-3].lower() in names:
                found[split].append((parts[-2], parts[-1], source))
    missing = [split for split, items in found.items() if not items]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)} images: {LAYOUT}")
    classes = tuple(sorted({name for name, _, _ in found["train"]}))
    strangers = {name for name, _, _ in found["test"]} - set(classes)
    if strangers:
        raise ValueError(f"{where} has test images of classes without training images: {sorted(strangers)[:5]}")
    result = []
    for items in found.values():
        items.sort(key=lambda item: item[:2])
        labels = torch.tensor([classes.index(name) for name, _, _ in items])
        result.append(in_memory(Pictures(labels, classes, sources=tuple(source for _, _, source in items))))
    return result[0], result[1]


def _cifar(folder: Path) -> tuple[Pictures, Pictures]:
    """Read CIFAR-10's python batches: pickled dicts of arrays. The unpickler refuses everything else."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    train = [_cifar_batch(folder / name) for name in names]
    pixels, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    test_pixels, test_labels = _cifar_batch(folder / "test_batch")
    return _numbered(Pictures(labels, (), pixels), Pictures(test_labels, (), test_pixels), folder)


def _numbered(train: Pictures, test: Pictures, where: Path) -> tuple[Pictures, Pictures]:
    """Return both splits with the class numbers as class names."""
    classes = tuple(str(i) for i in range(int(train.labels.max()) + 1))
    stranger = int(test.labels.max())
    if stranger >= len(classes):
        what = f"test images of class {stranger} and training images up to class {len(classes) - 1}"
        raise ValueError(f"{where} has {what}: use both from the same data set")
    return replace(train, classes=classes), replace(test, classes=classes)


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    if not path.exists():
        raise ValueError(
            f"{path} is missing: CIFAR-10's python version has data_batch_1 ... data_batch_5 and test_batch"
        )
    try:
        body = _Plain(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels = torch.from_numpy(body[b"data"].copy()).view(-1, 3, 32, 32)
        labels = torch.tensor(body[b"labels"])
        if pixels.dtype != torch.uint8 or labels.is_floating_point() or labels.shape != pixels.shape[:1]:
            raise ValueError(f"{tuple(pixels.shape)} {pixels.dtype} pixels, {tuple(labels.shape)} labels")
        if not len(labels) or labels.min() < 0:
            raise ValueError("it has no images, or labels below 0")
        return pixels, labels
    except Exception as error:  # unpickling an arbitrary file can raise anything
        raise ValueError(f"{path} is not a batch of CIFAR-10's python version ({error}): download it again") from error


class _Plain(pickle.Unpickler):
    """Unpickles arrays, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what an array needs, by its exact name: importing a module that a file names would run its code."""
        import numpy

        known: dict[tuple[str, str], Any] = {("numpy", name): getattr(numpy, name) for name in ("ndarray", "dtype")}
        known["_codecs", "encode"] = codecs.encode
        for core in ("numpy.core", "numpy._core"):  # before and since numpy 2
            known[f"{core}.multiarray", "_reconstruct"] = numpy.zeros(1).__reduce_ex__(2)[0]
            known[f"{core}.numeric", "_frombuffer"] = numpy.zeros(1).__reduce_ex__(5)[0]
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return known[module, name]


def _idx_split(folder: Path, prefix: str) -> Pictures:
    pixels = read_idx(_one_of(folder, f"{prefix}-images-idx3-ubyte"), 3)
    labels = read_idx(_one_of(folder, f"{prefix}-labels-idx1-ubyte"), 1).long()
    if len(pixels) != len(labels):
        raise ValueError(f"{folder} has {len(pixels)} {prefix} images and {len(labels)} labels: download both again")
    return Pictures(labels, (), pixels.unsqueeze(1))


def _one_of(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise ValueError(f"{folder} has no {name} nor {name}.gz: {LAYOUT}")


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Return the contents of an idx file of bytes, ``[N, ...]``."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            content: bytes = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): download it again") from error
    if len(content) < 4 + 4 * num_dims or content[:3] != b"\0\0\x08" or content[3] != num_dims:
        raise ValueError(f"{path} is not an idx file of bytes with {num_dims} dimensions: download it again")
    shape = struct.unpack(f">{num_dims}I", content[4 : 4 + 4 * num_dims])
    if 0 in shape or len(content) == 4 + 4 * num_dims:
        raise ValueError(f"{path} declares the shape {shape} and contains no data: download it again")
    flat = torch.frombuffer(bytearray(content[4 + 4 * num_dims :]), dtype=torch.uint8)
    if flat.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"{path} declares the shape {shape} and contains {flat.numel()} bytes: it is truncated; download it again"
        )
    return flat.view(shape)
