"""Distributed K-FAC for PyTorch: second-order training added to a training script with one line."""

import importlib as _importlib
import typing as _typing

from dkfac.config.settings import Settings

if _typing.TYPE_CHECKING:
    from dkfac import distributed
    from dkfac.config.advice import suggest
    from dkfac.kfac import KFAC
    from dkfac.runtime.attach import detach
    from dkfac.runtime.levenberg_marquardt import LevenbergMarquardt
    from dkfac.workers.place import roles

__all__ = ["KFAC", "LevenbergMarquardt", "Settings", "__version__", "detach", "distributed", "roles", "suggest"]
__version__ = "0.1.0"


def __getattr__(name: str) -> _typing.Any:
    """Import KFAC, and with it torch, on first use, so that plans can be made without torch."""
    if name == "KFAC":
        from dkfac import kfac

        return kfac.KFAC
    if name == "detach":
        return _importlib.import_module("dkfac.runtime.attach").detach
    if name == "distributed":
        return _importlib.import_module("dkfac.distributed")
    if name == "roles":
        return _importlib.import_module("dkfac.workers.place").roles
    if name == "LevenbergMarquardt":
        return _importlib.import_module("dkfac.runtime.levenberg_marquardt").LevenbergMarquardt
    if name == "suggest":
        return _importlib.import_module("dkfac.config.advice").suggest
    raise AttributeError(f"module 'dkfac' has no attribute {name!r}")
