"""Describe the machine and the versions of a benchmark run, for its JSON file of results."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

import torch

import dkfac


def environment() -> dict:
    """Return the versions and the hardware, as plain values."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "dkfac": dkfac.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
    }


def commit() -> str | None:
    """Return the commit that runs, None outside a checkout."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def write(path: str | pathlib.Path, results: dict) -> None:
    """Write results with the environment and the command that made them."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
    path.write_text(json.dumps({"environment": environment(), "command": command, **results}, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)
