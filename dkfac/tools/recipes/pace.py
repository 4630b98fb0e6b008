"""How fast a run is and how long it still takes, as a line for a terminal.

Input: a run and its rate. Output: a line of text. Owns: nothing.
"""

from __future__ import annotations

from dkfac.tools.recipes.folder import peak_memory
from dkfac.tools.recipes.job import TrainingRun


def pace_line(run: TrainingRun, loss: float, end: int, rate: float) -> str:
    """Return a line about a step between tests. ``rate``: steps per second, without tests and checkpoints."""
    left = (end - run.step) / rate
    shown = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min" if left < 7200 else f"{left / 3600:.1f} h"
    return (
        f"at step {run.step} of {run.num_steps}, epoch {run.epoch:.2f}, loss {loss:.4f}, {rate:.1f} steps/s, "
        f"{shown} left, {peak_memory(run.device)[0] / 1e9:.2f} GB"
    )
