"""Levenberg-Marquardt damping: adapt it to how well the quadratic model predicts the change of the loss.

Input: the loss before and after a step. Output: a new damping; a step that raised the loss is undone. Owns: the
damping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.comm.buffers import vector
from dkfac.comm.transport import Transport
from dkfac.factors.layer_state import LayerState
from dkfac.layers.layer import Layer, split_grad
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.precondition import rotate, spectrum
from dkfac.ops.torch_private import foreach_copy_

GOOD, POOR = 0.75, 0.25
"""Ratios of actual to predicted change above which damping is decreased and below which it is increased."""


LOSS_ROUNDING = 16.0
"""Rounding error of a loss, in units of machine epsilon."""


class LevenbergMarquardt:
    """A damping for ``KFAC(..., damping=LevenbergMarquardt(1e-2))``, adapted by ``kfac.lm_step`` every few steps.

    It decreases when the loss falls as much as the quadratic model predicts and increases when it does not. A step of
    ``lm_step`` that raises the loss is undone: the weights are restored, the optimizer's momentum is not.

    Args:
        initial: damping of the first step.
        low, high: bounds on the damping.
        every: number of steps between adaptations.
        factor: change of the damping per step, in (0, 1).
    """

    def __init__(
        self, initial: float = 1e-2, *, low: float = 1e-6, high: float = 1e3, every: int = 5, factor: float = 0.95
    ) -> None:
        if not 0 < low <= initial <= high:
            raise ValueError(f"LevenbergMarquardt: 0 < low <= initial <= high, not {low}, {initial}, {high}")
        if every < 1 or not 0 < factor < 1:
            raise ValueError(f"LevenbergMarquardt: every={every} counts steps, factor={factor} is between 0 and 1")
        self.value, self.low, self.high, self.every, self.factor = initial, low, high, every, factor
        self.ratio = math.nan
        """Actual over predicted change of the loss at the last adaptation."""

    def __call__(self, _step: int) -> float:
        return self.value

    def look(self, actual: float, predicted: float, noise: float = 0.0) -> None:
        """Adapt the damping. If the model predicts no decrease, the step counts as poor; if both changes are within
        ``noise``, the rounding error of the loss, the prediction counts as right."""
        self.ratio = actual / predicted if predicted < 0 and math.isfinite(actual) else -math.inf
        if max(abs(actual), abs(predicted)) <= noise:
            self.ratio = 1.0
        change = self.factor**self.every
        if self.ratio > GOOD:
            self.value = max(self.low, self.value * change)
        elif not self.ratio >= POOR:
            self.value = min(self.high, self.value / change)


def check_damping(settings: Any, optimizer: Any) -> tuple[Any, LevenbergMarquardt]:
    """Return the optimizer and the damping that ``lm_step`` adapts; raise if the settings do not allow it."""
    damping = settings.damping
    if not isinstance(damping, LevenbergMarquardt):
        raise RuntimeError(
            "lm_step changes a damping that was given as KFAC(..., damping=dkfac.LevenbergMarquardt(...))"
        )
    if settings.damping_mode != "absolute" or settings.uses_inverses or settings.curvature != "kfac":
        raise RuntimeError(
            'lm_step goes with damping_mode="absolute", solver="eigen" or "warm-eigen" and curvature="kfac": the '
            "model it looks at is the eigenvalues plus the damping"
        )
    if optimizer is None:
        raise RuntimeError("lm_step takes the optimizer's step: attach K-FAC to an optimizer")
    return optimizer, damping


def check_unscaled(scaler: Any, optimizer: Any) -> None:
    """Raise if gradients are still multiplied by the loss scale: they are compared with unscaled losses."""
    if scaler is None or not scaler.is_enabled():
        return
    known = scaler._per_optimizer_states.get(id(optimizer), {}) if optimizer is not None else {}
    if getattr(known.get("stage"), "name", "") != "UNSCALED":
        raise RuntimeError("gradients are scaled: call scaler.unscale_(optimizer) before lm_step or quadratic_step")


def lm_step(
    ranks: RankPlan,
    states: dict[str, LayerState],
    transport: Transport,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    damping: LevenbergMarquardt,
    loss_before: Tensor | float,
    closure: Callable[[], Tensor | float],
) -> None:
    """Take the optimizer's step, evaluate the same batch again and adapt the damping. Collective, and synchronizes with
    the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    old = [p.detach().clone() for p in parameters]
    raw = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    used = damping.value
    optimizer.step()
    with torch.no_grad():
        moves = [p - before for p, before in zip(parameters, old, strict=True)]
        linear = sum((move * grad).sum().double() for move, grad in zip(moves, raw, strict=True))
        ridge = used * sum(move.square().sum().double() for move in moves)
        curved = _curvature(ranks, states, dict(zip(map(id, parameters), moves, strict=True)))
        with buffers_kept(model):
            loss_after = closure()
    told = transport.total(vector([loss_before, loss_after, curved], ranks.layers[0].weight.device))
    told[:2] /= transport.world_size
    before, after, quadratic = told.tolist()
    dtype = loss_before.dtype if isinstance(loss_before, Tensor) else torch.float64
    noise = LOSS_ROUNDING * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * abs(before)
    damping.look(after - before, float(linear) + 0.5 * (quadratic + float(ridge)), noise)
    if damping.ratio < 0:
        with torch.no_grad():
            foreach_copy_(parameters, old)


def _curvature(ranks: RankPlan, states: dict[str, LayerState], moves: dict[int, Tensor]) -> Tensor | float:
    """Return ``move^T F move`` summed over the layers whose first preconditioning rank is this one."""
    total: Tensor | float = 0.0
    for layer in ranks.layers:
        basis = states[layer.name].basis()
        if basis is None or ranks.placements[layer.name].preconditioned_by[0] != ranks.rank:
            continue
        if not any(id(p) in moves for p in layer.parameters()):
            continue
        move = rotate(_canonical(layer, moves), basis)
        total = total + (move.square() * spectrum(basis, move.shape)).sum().double()
    return total


def _canonical(layer: Layer, moves: dict[int, Tensor]) -> Tensor:
    """Return the moves of a layer's parameters in canonical form, ``[B, O, I]``."""
    whole = torch.zeros(layer.spec.grad_shape, dtype=layer.dtype, device=layer.weight.device)
    for p, part in zip(layer.parameters(), split_grad(layer, whole), strict=True):
        if id(p) in moves:
            part.copy_(moves[id(p)])
    return whole


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, such as running statistics, on exit."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
