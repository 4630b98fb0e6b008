"""Cluster presets that come with dkfac, as files.

Input: a name or a path. Output: a cluster. Owns: nothing.
"""

from __future__ import annotations

from pathlib import Path

from dkfac.plan.cluster import Cluster

FOLDER = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_cluster(name: str) -> Cluster:
    """Return a preset, or the cluster that ``dkfac measure`` wrote to a file."""
    if name in PRESETS:
        return Cluster.from_json((FOLDER / f"{name}.json").read_text(), name)
    if not Path(name).is_file():
        raise ValueError(f"cluster {name!r}: no such file of `dkfac measure`, and not one of {', '.join(PRESETS)}")
    return Cluster.from_json(Path(name).read_text(), name)
