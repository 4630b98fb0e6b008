"""Counters and device scalars of one ``KFAC`` instance.

Input: reports of the stages. Output: values for loggers and checkpoints. Owns: all of them; nothing else counts.
"""

from __future__ import annotations

from torch import Tensor

from dkfac.decompose.fallback import OUTCOMES
from dkfac.decompose.report import RefreshReport
from dkfac.precondition.report import UpdateReport


class Metrics:
    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.device_metrics: dict[str, Tensor] = {}
        """GPU scalars, updated without synchronizing."""
        self.tf32_unsafe_layers: set[str] = set()
        """Layers whose gradients would lose too much accuracy in TF32."""
        self._refreshed_at = -1
        self.load({}, {})

    def load(self, counters: dict[str, int], device_metrics: dict[str, Tensor]) -> None:
        """Continue counting from loaded values."""
        self.counters = dict.fromkeys(("refreshes", "late", "repaired", *OUTCOMES), 0) | counters
        self.device_metrics = device_metrics

    def count(self, name: str, happened: Tensor) -> None:
        """Add a boolean tensor to a counter on the device."""
        known = self.device_metrics.get(name)
        if known is not None and known.device == happened.device:
            known += happened
        else:
            self.device_metrics[name] = happened.float() + (0.0 if known is None else known.to(happened.device))

    def add_refresh(self, report: RefreshReport, step: int) -> None:
        """Count what a refresh did; at most one refresh is counted per step."""
        for outcome, number in report.outcomes.items():
            self.counters[outcome] += number
        self.counters["late"] += report.num_late
        self.counters["repaired"] += report.num_repaired
        if report.refreshed and self._refreshed_at != step:
            self._refreshed_at = step
            self.counters["refreshes"] += 1
        for name, is_safe in report.tf32_safe.items():
            (self.tf32_unsafe_layers.discard if is_safe else self.tf32_unsafe_layers.add)(name)

    def add_update(self, report: UpdateReport) -> None:
        """Keep the norms of a step, and count whether it was clipped."""
        if report.clip_factor is not None:
            self.device_metrics["clip_factor"] = report.clip_factor
            self.count("clipped_steps", report.clip_factor < 1)
        if report.grad_norm is not None and report.update_norm is not None:
            self.device_metrics["grad_norm"] = report.grad_norm
            self.device_metrics["update_norm"] = report.update_norm

    def clipped_share(self, step: int) -> float:
        """Return the share of steps that the KL clip shortened. Synchronizes with the device."""
        return float(self.device_metrics.get("clipped_steps", 0.0)) / step
