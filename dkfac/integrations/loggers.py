"""Log ``kfac.metrics()`` to whatever a training script logs to.

Input: an attached ``KFAC`` and a logger. Output: one call of the logger's own method. Owns: nothing; imports no logger.
"""

from __future__ import annotations

from typing import Any, Protocol


class Measured(Protocol):
    """What has metrics: a ``KFAC``."""

    def metrics(self) -> dict[str, float]: ...


def log_metrics(kfac: Measured, logger: Any, step: int | None = None, prefix: str = "kfac/") -> dict[str, float]:
    """Log the metrics of the last step, and return them under the names they were logged by.

    ``logger`` is a TensorBoard ``SummaryWriter`` (``add_scalar``); the module ``mlflow`` or a logger of
    Lightning (``log_metrics``); the module ``wandb``, a W&B run or an ``Accelerator`` (``log``); or a function of the
    metrics and the step. ``step`` is K-FAC's own if None. Synchronizes with the device, so call it every few steps.
    """
    found = kfac.metrics()
    at = int(found.pop("step")) if step is None else step
    found = {f"{prefix}{name}": value for name, value in found.items() if name != "step"}
    if hasattr(logger, "add_scalar"):
        for name, value in found.items():
            logger.add_scalar(name, value, at)
    elif hasattr(logger, "log_metrics"):
        logger.log_metrics(found, step=at)
    elif hasattr(logger, "log"):
        logger.log(found, step=at)
    elif callable(logger):
        logger(found, at)
    else:
        raise TypeError(
            f"log_metrics(kfac, logger) needs a logger with add_scalar, log_metrics or log, or a function of the "
            f"metrics and the step, not {type(logger).__name__}"
        )
    return found
