"""Atomic checkpoints: each in a new folder, with a manifest of checksums and a pointer to the latest.

Input: state dicts by file name. Output: the newest complete checkpoint, and the state in it. Owns: the folder
``checkpoints/`` of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KEPT = 2
VERSION = 1


def part(folder: Path, step: int) -> Path:
    """Return the temporary folder that the ranks write the files of a new checkpoint to."""
    return folder / f".step-{step:08d}.part"


def write_state(folder: Path, step: int, name: str, state: dict[str, Any]) -> None:
    """Write one file of a checkpoint and flush it to disk."""
    place = part(folder, step)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / f"{name}.pt", "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch.save's error for a full disk
            raise OSError(f"{place / name}.pt: {error}") from error
        file.flush()
        os.fsync(file.fileno())


def commit(folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Turn the written files into a checkpoint: write the manifest, rename the folder, update the pointer. Remove all
    but the last few checkpoints."""
    place, final = part(folder, step), folder / f"step-{step:08d}"
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(place.glob("*.pt"))}
    body = {"version": VERSION, "step": step, "files": files, **about}
    _replace(place / "manifest.json", json.dumps(body | {"sha256": _seal(body)}, indent=1))
    if final.exists():
        shutil.rmtree(final)
    os.replace(place, final)
    _sync(folder)
    _replace(folder / "latest", final.name)
    others = [other for other in sorted(folder.glob("step-*")) if other != final]
    later = [other for other in others if other.name > final.name]  # from a run that was resumed at an earlier step
    for other in [*later, *others[: len(others) - len(later) - KEPT + 1]]:
        shutil.rmtree(other, ignore_errors=True)
    for rest in folder.glob(".step-*.part"):
        shutil.rmtree(rest, ignore_errors=True)
    return final


def abandon(folder: Path, step: int) -> None:
    """Remove the files of a checkpoint that could not be written completely."""
    shutil.rmtree(part(folder, step), ignore_errors=True)


def newest(folder: Path, said: list[str]) -> Path | None:
    """Return the newest complete checkpoint, or None. Messages about skipped ones are appended to ``said``."""
    for place in _candidates(folder):
        wrong = fault(place)
        if wrong is None:
            return place
        said.append(f"{place} is skipped: {wrong}")
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield the checkpoint that the pointer names, then the others, newest first."""
    pointer = folder / "latest"
    first = folder / pointer.read_text(errors="replace").strip() if pointer.is_file() else None
    if first is not None and first.parent == folder:
        yield first
    yield from (place for place in sorted(folder.glob("step-*"), reverse=True) if place != first)


def fault(place: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    try:
        body = json.loads((place / "manifest.json").read_text())
        version, seal = body["version"], body.pop("sha256", None)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    if version != VERSION:
        return f"it has version {version!r}, this dkfac reads {VERSION}"
    if seal != _seal(body):
        return "its manifest is damaged"
    wanted = ["common.pt", *(f"rank-{rank}.pt" for rank in range(body.get("world_size", 0)))]
    lacking = [name for name in wanted if name not in body["files"]]
    if lacking:
        return f"{lacking[0]} was not written"
    for name, expected in body["files"].items():
        path = place / name
        if path.parent != place or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or _digest(path) != expected["sha256"]:
            return f"{name} is damaged"
    return None


def read_manifest(place: Path) -> dict[str, Any]:
    """Return the contents of the manifest."""
    body: dict[str, Any] = json.loads((place / "manifest.json").read_text())
    return body


def read_state(place: Path, name: str, device: torch.device) -> dict[str, Any]:
    """Load one file of a checkpoint: tensors, numbers and strings only."""
    path = place / f"{name}.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:  # torch's message advises to load it all the same
        raise ValueError(
            f"{path} has more than tensors, numbers and strings, which could run code when it is loaded: dkfac did not "
            f"write it. Do not load it by other means; continue from another checkpoint or begin anew"
        ) from None
    return state


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    other = path.with_name(f".{path.name}.new")
    with open(other, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(other, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
