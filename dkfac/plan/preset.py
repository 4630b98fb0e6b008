"""Clusters that come with dkfac, as files."""

from __future__ import annotations

from pathlib import Path

from dkfac.plan.cluster import Cluster

FOLDER = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str) -> Cluster:
    return Cluster.from_json((FOLDER / f"{name}.json").read_text(), name)
