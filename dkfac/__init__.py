"""Distributed K-FAC for PyTorch: second-order training added to a training script with one line."""

import importlib as _importlib
import typing as _typing

from dkfac.settings import Settings

if _typing.TYPE_CHECKING:
    from dkfac import distributed
    from dkfac.advice import suggest
    from dkfac.crew.place import roles
    from dkfac.kfac import KFAC, detach
    from dkfac.trust import LevenbergMarquardt

__all__ = ["KFAC", "LevenbergMarquardt", "Settings", "__version__", "detach", "distributed", "roles", "suggest"]
__version__ = "0.1.0"


def __getattr__(name: str) -> _typing.Any:
    """Import KFAC, and with it torch, on first use: plans are made without torch."""
    if name in ("KFAC", "detach"):
        from dkfac import kfac

        return getattr(kfac, name)
    if name == "distributed":
        return _importlib.import_module("dkfac.distributed")
    if name == "roles":
        return _importlib.import_module("dkfac.crew.place").roles
    if name == "LevenbergMarquardt":
        return _importlib.import_module("dkfac.trust").LevenbergMarquardt
    if name == "suggest":
        return _importlib.import_module("dkfac.advice").suggest
    raise AttributeError(f"module 'dkfac' has no attribute {name!r}")
