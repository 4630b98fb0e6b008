"""Find the layers of a loaded state that start from scratch: those that any rank lacks.

Input: a loaded state on each rank. Output: layer names, identical on all ranks. Owns: nothing.
"""

from __future__ import annotations

import warnings

from dkfac.comm.transport import Transport
from dkfac.factors.layer_state import LayerState
from dkfac.layers.rank_plan import RankPlan
from dkfac.state.restore import Loaded


def start_anew(loaded: Loaded, ranks: RankPlan, transport: Transport, states: dict[str, LayerState]) -> set[str]:
    """Give layers that a rank lacks an empty state, and return their names. Raises if ranks load different steps.
    Collective."""
    missing = [float(layer.name in loaded.lacking) for layer in ranks.layers]
    told = transport.gather_numbers([float(loaded.step), *missing])
    steps = [int(numbers[0]) for numbers in told]
    if len(set(steps)) > 1:
        raise RuntimeError(f"ranks resumed at different steps {steps}: load the same K-FAC state on all ranks")
    names = {la.name for i, la in enumerate(ranks.layers) if any(row[1 + i] > 0 for row in told)}
    for name in names:
        states[name] = LayerState(states[name].num_factors)
    if names and ranks.rank == 0:
        warnings.warn(
            f"the K-FAC state that was loaded lacks {len(names)} of {len(ranks.layers)} layers, which are measured "
            f"anew. Was it saved by one rank of several? Save with torch.distributed.checkpoint, or "
            f"kfac.state_dict(gather=True) on all ranks.",
            stacklevel=2,
        )
    return names
