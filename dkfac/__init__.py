"""Distributed K-FAC for PyTorch: second-order training added to a training script with one line."""

from dkfac.kfac import KFAC
from dkfac.settings import Settings

__all__ = ["KFAC", "Settings", "__version__"]
__version__ = "0.1.0"
