"""Advice on transferring a tuned configuration. Input: optimizer, number of steps. Output: text. Owns: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def suggest(optimizer: torch.optim.Optimizer, total_steps: int, *, write: Callable[[str], Any] = print) -> None:
    """Print which settings of a tuned run to keep, what to change, which six runs to try, and remedies by symptom.

    ``total_steps``: number of steps of the tuned run. ``write``: called with the text.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"suggest(optimizer, total_steps) needs a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise ValueError(f"total_steps={total_steps!r} is not an integer >= 1: it counts steps")
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    write(_text(type(optimizer).__name__, rates, total_steps))


def _text(name: str, rates: list[float], steps: int) -> str:
    return f"""{name}, lr {_numbers(rates)}, {steps} steps: dkfac.KFAC(model, optimizer)
keep     learning rate, momentum or betas, weight decay, clipping, batch size, and the shape of the schedule
change   the steps: start with three quarters of them, schedule included
try      lr {_numbers([f * r for f in (1, 2) for r in rates[:1]])} x steps {steps // 2}, {steps * 3 // 4}, {steps}
{_SYMPTOMS}
  {f"loss level with {name}'s":29}the learning rate is too low for both: raise it until training becomes unstable
  unstable at the peak lr      a longer warm-up; more frequent refreshes: factor_interval=5, inverse_interval=5
  much slower per step         larger intervals, statistics_fraction=0.25; block_dim=128; skip=[...] for layers as
                               large as a vocabulary"""


_SYMPTOMS = """look at  kfac.metrics(): grad_norm, update_norm, skipped_batches; kfac.report(): seconds by stage
  validation worse than train  more weight decay, fewer steps: K-FAC fits faster, so it also overfits earlier"""


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
