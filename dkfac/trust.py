"""Damping that follows how well the quadratic model predicts (Levenberg-Marquardt)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dkfac.comm import collectives
from dkfac.exchange import vector
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.precondition import rotate, spectrum

if TYPE_CHECKING:
    from dkfac.run import Runner

GOOD, POOR = 0.75, 0.25
"""Ratios of actual to predicted change beyond which damping falls or rises."""


ROUNDING = 16.0
"""Of a loss, in units of its last digit."""


class LevenbergMarquardt:
    """A damping for ``KFAC(..., damping=LevenbergMarquardt(1e-2))``, changed by ``kfac.lm_step`` every few steps.

    It falls where the loss falls as much as the quadratic model says, and rises where it does not. A step of
    ``lm_step`` that is seen to raise the loss is taken back: weights are what they were, the momentum goes on.
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
        """Of the last look: actual change over predicted change."""

    def __call__(self, _step: int) -> float:
        return self.value

    def look(self, actual: float, predicted: float, noise: float = 0.0) -> None:
        """Change damping by what happened. A step that the model itself calls no improvement is a poor one; where both
        changes are within the ``noise`` of the loss's own rounding, the model is right."""
        self.ratio = actual / predicted if predicted < 0 and math.isfinite(actual) else -math.inf
        if max(abs(actual), abs(predicted)) <= noise:
            self.ratio = 1.0
        change = self.factor**self.every
        if self.ratio > GOOD:
            self.value = max(self.low, self.value * change)
        elif not self.ratio >= POOR:
            self.value = min(self.high, self.value / change)


def check(settings: Any, optimizer: Any) -> tuple[Any, LevenbergMarquardt]:
    """Return the optimizer and the damping that ``lm_step`` is to change."""
    damping = settings.damping
    if not isinstance(damping, LevenbergMarquardt):
        raise RuntimeError(
            "lm_step changes a damping that was given as KFAC(..., damping=dkfac.LevenbergMarquardt(...))"
        )
    if settings.damping_mode != "absolute" or settings.solver == "cholesky" or settings.curvature != "kfac":
        raise RuntimeError(
            'lm_step goes with damping_mode="absolute", solver="eigen" or "warm-eigen" and curvature="kfac": the '
            "model it looks at is the eigenvalues plus the damping"
        )
    if optimizer is None:
        raise RuntimeError("lm_step takes the optimizer's step: attach K-FAC to an optimizer")
    return optimizer, damping


def check_unscaled(scaler: Any, optimizer: Any) -> None:
    """Refuse gradients that are still multiplied by a loss scale: they are compared with losses that are not."""
    if scaler is None or not scaler.is_enabled():
        return
    known = scaler._per_optimizer_states.get(id(optimizer), {}) if optimizer is not None else {}
    if getattr(known.get("stage"), "name", "") != "UNSCALED":
        raise RuntimeError("gradients are scaled: call scaler.unscale_(optimizer) before lm_step or quadratic_step")


def step(
    runner: Runner,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    damping: LevenbergMarquardt,
    loss_before: Tensor | float,
    closure: Callable[[], Tensor | float],
) -> None:
    """Take the optimizer's step; every few steps look at the same batch again and change the damping."""
    check_unscaled(runner.tape.scaler, optimizer)
    if runner.step % damping.every:
        optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    old = [p.detach().clone() for p in parameters]
    raw = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    used = damping.value
    optimizer.step()
    with torch.no_grad():
        moves = [p - before for p, before in zip(parameters, old, strict=True)]
        linear = sum((move * grad).sum().double() for move, grad in zip(moves, raw, strict=True))
        ridge = used * sum(move.square().sum().double() for move in moves)
        curved = _curvature(runner, dict(zip(map(id, parameters), moves, strict=True)))
        with buffers_kept(model):
            loss_after = closure()
    told = vector([loss_before, loss_after, curved], runner.layers[0].weight.device)
    if runner.exchange is not None:
        told = collectives.all_reduce(told, runner.exchange.groups.everyone).wait()
        told[:2] /= runner.plan.world_size
    before, after, quadratic = told.tolist()
    dtype = loss_before.dtype if isinstance(loss_before, Tensor) else torch.float64
    noise = ROUNDING * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * abs(before)
    damping.look(after - before, float(linear) + 0.5 * (quadratic + float(ridge)), noise)
    if damping.ratio < 0:
        with torch.no_grad():
            torch._foreach_copy_(parameters, old)


def _curvature(runner: Runner, moves: dict[int, Tensor]) -> Tensor | float:
    """Return ``move^T F move`` of the layers that this rank is the first to precondition."""
    total: Tensor | float = 0.0
    for layer in runner.layers:
        state = runner.states[layer.name]
        basis = state.basis()
        if basis is None or runner.placements[layer.name].preconditioned_by[0] != runner.rank:
            continue
        if not any(id(p) in moves for p in layer.parameters()):
            continue
        move = rotate(_canonical(layer, moves), basis)
        total = total + (move.square() * spectrum(basis, move.shape[-1])).sum().double()
    return total


def _canonical(layer: Layer, moves: dict[int, Tensor]) -> Tensor:
    """Return the moves of a layer's parameters, ``[B, O, I]``."""
    whole = torch.zeros(layer.spec.grad_shape, dtype=layer.dtype, device=layer.weight.device)
    for p, part in zip(layer.parameters(), split_grad(layer, whole), strict=True):
        if id(p) in moves:
            part.copy_(moves[id(p)])
    return whole


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Let a forward leave running statistics as they are."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
