"""The run folder: settings, environment and metrics of a run. ``docs/notes/009-recipes.md`` lists its files.

Input: entries of a run. Output: JSON files. Owns: the files of the run folder other than checkpoints, and its lock.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import dkfac

_NUM_EIGENVALUES = 64
_MAX_SPECTRUM_DIM = 1024
"""Largest factor whose spectrum is computed."""


class Log:
    """Writes to the run folder on rank 0; does nothing on other ranks. A failed write is reported once."""

    def __init__(self, folder: Path, place: dkfac.distributed.Place, *, is_resumed: bool, tensorboard: bool) -> None:
        """Lock the folder. Nothing in it is changed yet."""
        self._folder, self._place = folder, place
        self._file: Any = None
        self._board: Any = None
        self._lock: Any = None
        self._has_complained = False
        if place.rank != 0:
            return
        has_run = (folder / "metrics.jsonl").exists() or any((folder / "checkpoints").glob("step-*"))
        if has_run and not is_resumed:
            raise ValueError(f"{folder} already has a run: use another --out, or --resume {folder}")
        if tensorboard:
            _board_class()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        self._wants_board = tensorboard

    def begin(self, about: dict[str, Any], step: int) -> None:
        """Write settings and environment, and remove entries that were logged after the step that the run starts
        from."""
        if self._lock is None:
            return
        _write(self._folder / "settings.json", about)
        _write(self._folder / "environment.json", describe_environment(self._place.device))
        path = self._folder / "metrics.jsonl"
        old = entries(path) if path.exists() else ()
        kept = [entry for entry in old if entry.get("step", 0) <= step and entry.get("kind") != "end"] if step else []
        other = path.with_name(".metrics.jsonl.new")
        other.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(other, path)
        self._file = open(path, "a")  # noqa: SIM115 - closed by __exit__
        if self._wants_board:
            self._board = _board_class()(str(self._folder / "tensorboard"))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in (self._file, self._board, self._lock):
            if file is not None:
                with self._complaining():
                    file.close()

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        """Continue after a failed write, for example on a full disk."""
        try:
            yield
        except OSError as error:
            if not self._has_complained:
                print(f"dkfac: {self._folder} cannot be written ({error}); training continues", file=sys.stderr)
            self._has_complained = True

    def add(self, **entry: Any) -> None:
        if self._file is None:
            return
        with self._complaining():
            self._file.write(json.dumps(to_json_value(entry)) + "\n")
            self._file.flush()
        if self._board is not None and entry["kind"] in ("step", "test"):
            flat = {**entry, **{f"kfac/{k}": v for k, v in entry.get("kfac", {}).items()}}
            for name, value in flat.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])

    def summarise(
        self,
        own: list[float],
        gather: Callable[[list[float]], list[list[float]]],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        """Write the peak memory of each rank and K-FAC's report, which ``describe`` returns. A collective call."""
        ranks = gather(own)
        if self._lock is None:
            return
        body = {"peak_memory_bytes": [numbers[0] for numbers in ranks], **describe()}
        with self._complaining():
            _write(self._folder / "summary.json", body)


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a metrics file. Truncated or damaged lines are skipped."""
    with open(path, errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry


def _locked(folder: Path) -> Any:
    """Return an open file on which this process holds the lock of the folder."""
    file = open(folder / ".lock", "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{folder} is in use by another process: wait for it, or use another --out") from None
    except OSError:  # a file system without locks
        pass
    return file


def describe_environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "dkfac": dkfac.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    return found


def peak_memory(device: torch.device) -> list[float]:
    """Return this rank's peak memory in bytes: of its GPU, or of the process."""
    if device.type == "cuda":
        return [float(torch.cuda.max_memory_allocated(device))]
    return [1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]


def factor_spectra(factors: Mapping[str, Mapping[str, torch.Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield eigenvalues of the factors of the first, the middle and the last layer, from ``kfac.factors()``; those of
    all pieces of a factor together."""
    names = list(factors)
    for name in dict.fromkeys([*names[:1], *names[len(names) // 2 :][:1], *names[-1:]]):
        for key, factor in factors[name].items():
            if factor.shape[-1] > _MAX_SPECTRUM_DIM or factor.ndim < 2 or factor.shape[-2] != factor.shape[-1]:
                continue
            values = torch.linalg.eigvalsh(factor.detach().double().cpu()).flatten().sort(descending=True).values
            values = values.clamp(min=0)
            places = torch.linspace(0, len(values) - 1, min(_NUM_EIGENVALUES, len(values))).round().long()
            largest, least = float(values[0]), float(values[values > values[0] * 1e-12][-1]) if values[0] > 0 else 0.0
            yield {
                "layer": name,
                "factor": key,
                "eigenvalues": values[places].tolist(),
                "condition": largest / least if least > 0 else None,
            }


def to_json_value(value: Any) -> Any:
    """Return a value that JSON can represent: non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write(path: Path, body: Any) -> None:
    other = path.with_name(f".{path.name}.new")
    other.write_text(json.dumps(to_json_value(body), indent=1, default=str) + "\n")
    os.replace(other, path)


def _board_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter
