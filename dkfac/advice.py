"""How to carry a tuned configuration over to K-FAC, as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def suggest(optimizer: torch.optim.Optimizer, total_steps: int, *, write: Callable[[str], Any] = print) -> None:
    """Say what of a tuned run to keep, what to change, which six runs to try, and what to look at by symptom.

    ``total_steps``: of the tuned run. ``write``: what prints.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"suggest(optimizer, total_steps) needs a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise ValueError(f"total_steps={total_steps!r} is not a number of steps, an integer >= 1")
    is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    name = type(optimizer).__name__
    write(_adam(name, rates, total_steps) if is_adam else _other(name, rates, total_steps))


def _adam(name: str, rates: list[float], steps: int) -> str:
    return f"""{name}, lr {_numbers(rates)}, {steps} steps: dkfac.KFAC(model, optimizer), its step in the eigenbasis
keep     betas, eps, weight decay, clipping, batch size, and the shape of the schedule
change   the learning rate: it can be several times as large; the steps: start with half of them, schedule included
try      lr {_numbers([f * r for f in (1, 3, 6) for r in rates[:1]])} x steps {steps // 2}, {steps}
{_SYMPTOMS}
  {f"loss level with {name}'s":29}the learning rate is still {name}'s: go up until it breaks
  loss breaks at the peak      a longer warm-up; rescale="kl-clip", kl_clip=1e-4; split_dim just above the model's width
  much slower per step         split_dim; all of factor_interval=40, inverse_interval=40, solver="warm-eigen";
                               skip=[...] for layers of a vocabulary's size"""


def _other(name: str, rates: list[float], steps: int) -> str:
    return f"""{name}, lr {_numbers(rates)}, {steps} steps: dkfac.KFAC(model, optimizer)
keep     learning rate, momentum, weight decay, batch size, and the shape of the schedule: updates keep their length
change   the steps: start with three quarters of them, schedule included
try      damping 1e-4, 3e-4, 1e-3 x steps {steps * 3 // 4}, {steps}
{_SYMPTOMS}
  {f"loss level with {name}'s":29}damping too large: try a tenth of it, or damping_mode="relative"
  loss falls late or breaks    damping too small, or bases too old: factor_interval=2, inverse_interval=20
  much slower per step         solver="cholesky", larger intervals, statistics_fraction=0.25"""


_SYMPTOMS = """look at  kfac.metrics(): grad_norm, update_norm, skipped_batches; kfac.report(): seconds by stage
  validation worse than train  more weight decay, fewer steps: it fits faster, so it also overfits earlier"""


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
