"""K-FAC in Lightning's ``Trainer``, with automatic and with manual optimization.

Input: the events of a ``Trainer``. Output: a ``KFAC`` for each optimizer while training, their states in checkpoints,
their metrics in the loggers. Owns: these ``KFAC``, and states that were loaded before they could be attached.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from dkfac.integrations.loggers import log_metrics
from dkfac.kfac import KFAC

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

KEY = "dkfac"
"""Where K-FAC's states are in a checkpoint."""


class KFACCallback(Callback):
    """Trains with K-FAC: ``Trainer(..., callbacks=[KFACCallback()])``.

    Args:
        optimizers: the positions of the optimizers to attach to, as ``configure_optimizers`` returns them; all if None.
        options: the arguments of :class:`dkfac.KFAC`, for example ``damping=1e-3``.
    """

    def __init__(self, *, optimizers: Iterable[int] | None = None, **options: Any) -> None:
        self.kfacs: dict[int, KFAC] = {}
        """The attached ``KFAC`` by position of its optimizer; closed when training ends."""
        self._optimizers, self._options = None if optimizers is None else set(optimizers), options
        self._loaded: dict[str, Any] | None = None

    @property
    def kfac(self) -> KFAC | None:
        """The attached ``KFAC`` of the first optimizer, or None."""
        return next(iter(self.kfacs.values()), None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        self.kfacs = {}
        divides = pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1
        options = ({"accumulate": "mean"} if divides else {}) | self._options
        for i, optimizer in enumerate(trainer.optimizers):
            if self._optimizers is None or i in self._optimizers:
                self.kfacs[i] = KFAC(pl_module, optimizer, **options)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            for i, kfac in self.kfacs.items():
                if str(i) in loaded:
                    kfac.load_state_dict(loaded[str(i)])
        elif trainer.global_step > 0:
            warnings.warn(
                f"training resumes at step {trainer.global_step} from a checkpoint without K-FAC's state: its "
                f"statistics start anew",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.log_every_n_steps or not trainer.is_global_zero or not trainer.loggers:
            return
        for i, kfac in self.kfacs.items():
            for logger in trainer.loggers:
                log_metrics(kfac, logger, trainer.global_step, "kfac/" if len(self.kfacs) == 1 else f"kfac/{i}/")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.kfacs:  # all ranks call this, and the first one writes the file
            checkpoint[KEY] = {str(i): kfac.state_dict(gather=True) for i, kfac in self.kfacs.items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(KEY)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Detach K-FAC, if it is attached."""
        for kfac in self.kfacs.values():
            kfac.close()
