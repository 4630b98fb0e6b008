"""K-FAC in the ``Trainer`` of transformers, and in the trainers of TRL, which are subclasses of it.

Input: the events of a ``Trainer``. Output: a ``KFAC`` attached for the time of training, its state in each checkpoint
folder, its metrics in the log. Owns: that ``KFAC``, and a hook on the model that counts the terms of the loss.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from dkfac.capture.traceless import CaptureHook
from dkfac.integrations.loggers import log_metrics
from dkfac.kfac import KFAC

STATE_FILE = "kfac.pt"
IGNORED = -100
"""The label that transformers leaves out of its losses."""
LOGGED = ("damping", "refreshes", "skipped_batches", "grad_norm", "update_norm")
TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification", "LMHead")
"""Parts of the names of models whose loss is a mean over tokens."""
SHIFTED_LOSSES = ("ForCausalLM", "LMHead", "ForConditionalGeneration")
"""Those of them that predict the next token: the first label of a sequence is not used, unless there is a decoder."""


class KFACCallback(TrainerCallback):
    """Trains with K-FAC: ``Trainer(..., callbacks=[KFACCallback()])``.

    The loss is a mean over the labels that count: their number is read from each batch, also with gradient
    accumulation. Each checkpoint folder gets a file ``kfac.pt``, from which training resumes.

    Args:
        resume_from: the checkpoint folder that training resumes from, if it is not ``args.output_dir/checkpoint-N``.
        logger: logs all metrics to this logger as well, see :func:`dkfac.integrations.loggers.log_metrics`.
        options: the arguments of :class:`dkfac.KFAC`, for example ``damping=1e-3``.
    """

    def __init__(
        self, *, resume_from: str | os.PathLike[str] | None = None, logger: Any = None, **options: Any
    ) -> None:
        self.kfac: KFAC | None = None
        """The attached ``KFAC``; closed when training ends."""
        self._resume_from, self._logger, self._options = resume_from, logger, options
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()
        model = given["model"]
        self.kfac = KFAC(model, given["optimizer"], **(self._loss_options(args, model) | self._options))
        hook = TermsHook(self.kfac.set_terms, shifts=_shifts_labels(model), is_decoder=not _has_encoder(model))
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        if state.global_step > 0:
            self._resume(args, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.kfac is None:
            return
        saved = self.kfac.state_dict(gather=True)  # all ranks; the others return an empty dict
        if state.is_world_process_zero:
            folder = _folder(args, state.global_step)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(saved, folder / STATE_FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        if self.kfac is None or logs is None or "loss" not in logs or not state.is_world_process_zero:
            return
        metrics = self.kfac.metrics()
        found = {f"kfac_{name}": metrics[name] for name in LOGGED if name in metrics}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        if self._logger is not None:
            log_metrics(self.kfac, self._logger, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()

    def close(self) -> None:
        """Detach K-FAC, if it is attached."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self.kfac is not None:
            self.kfac.close()

    def _loss_options(self, args: Any, model: nn.Module) -> dict[str, Any]:
        """Return what the ``Trainer`` does with the loss, as K-FAC's settings."""
        options: dict[str, Any] = {"loss_terms": "token"} if _has_name(model, TOKEN_LOSSES) else {}
        is_several = args.gradient_accumulation_steps > 1
        of_all_ranks = getattr(args, "average_tokens_across_devices", False)
        if _takes_number_of_items(model) and (is_several or of_all_ranks):
            options["accumulate"] = "terms"
        elif is_several:
            options["accumulate"] = "mean"
        return options

    def _resume(self, args: Any, step: int) -> None:
        given = self._resume_from or args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, (str, os.PathLike)) and os.path.isdir(given) else _folder(args, step)
        path = folder / STATE_FILE
        assert self.kfac is not None
        if path.exists():
            self.kfac.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        elif self.kfac.metrics()["step"] == 0:  # otherwise the optimizer has brought it
            warnings.warn(
                f"training resumes at step {step}, but there is no {path}: K-FAC's statistics start anew. If the "
                f"checkpoint is in another folder, use KFACCallback(resume_from=folder)",
                stacklevel=2,
            )


class TermsHook(CaptureHook):
    """Forward pre-hook of the model: tells K-FAC how many labels of this batch count."""

    def __init__(self, set_terms: Callable[..., None], *, shifts: bool, is_decoder: bool) -> None:
        """``set_terms`` is K-FAC's. ``shifts``: whether the first label of a sequence is not used. ``is_decoder``:
        whether inputs have the positions of the labels."""
        self._set_terms, self._shifts, self._is_decoder = set_terms, shifts, is_decoder

    def __call__(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not model.training or not torch.is_grad_enabled():
            return
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if isinstance(shifted, Tensor):
            labels = shifted
        elif isinstance(labels, Tensor) and self._shifts and labels.ndim > 1:
            labels = labels[..., 1:]
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return  # K-FAC counts examples, or positions
        counted = labels.ne(IGNORED).sum().clamp(min=1)
        mask = given.get("attention_mask")
        if not self._is_decoder or not isinstance(mask, Tensor) or mask.ndim != 2 or labels.ndim != 2:
            mask = None
        elif mask.device.type == "cpu" and bool(mask.all()):
            mask = None  # nothing to leave out
        self._set_terms(float(counted) if counted.device.type == "cpu" else counted, mask)


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _inner(model: Any) -> Any:
    """Return the model inside that of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _has_name(model: nn.Module, parts: tuple[str, ...]) -> bool:
    return any(part in type(_inner(model)).__name__ for part in parts)


def _has_encoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(_inner(model), "config", None), "is_encoder_decoder", False))


def _shifts_labels(model: nn.Module) -> bool:
    return _has_name(model, SHIFTED_LOSSES) and not _has_encoder(model)


def _takes_number_of_items(model: nn.Module) -> bool:
    """Whether the ``Trainer`` divides sums of losses by the number of labels of all micro-batches.

    It does for models that take this number as an argument; otherwise it divides means by the number of micro-batches.
    """
    inner = _inner(model)
    if hasattr(inner, "accepts_loss_kwargs"):
        return bool(inner.accepts_loss_kwargs)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
