"""Precondition gradients by the inverse of the curvature ``A x G``, for one layer or a stack.

Input: gradients and decompositions. Output: preconditioned gradients. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.config.step_context import StepContext
from dkfac.decompose.layer_damping import damping_of, stack_damping
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer
from dkfac.ops import precondition as ops
from dkfac.ops.decompose import Eigen, Inverse


def kronecker_updates(stack: Stack, states: dict[str, LayerState], grads: Tensor, context: StepContext) -> Tensor:
    """Return the preconditioned gradients of a stack whose layers all have decompositions."""
    joined = stack.decompositions(states)
    assert joined is not None
    if stack.transposed:
        joined = ops.swapped(joined)
    bases = {key: d for key, d in joined.items() if isinstance(d, Eigen)}
    if bases:
        damping = stack_damping(stack, states, context.settings, context.step)
        return ops.precondition_eigen(grads, bases, damping=damping)
    updates = ops.precondition_inverse(grads, {key: d for key, d in joined.items() if isinstance(d, Inverse)})
    if stack.layers[0].leaves_bias:
        means = {key: torch.cat([states[layer.name].means[key] for layer in stack.layers]) for key in ("A", "G")}
        damping = stack_damping(stack, states, context.settings, context.step)
        rows = updates.mT if stack.transposed else updates
        rows[..., stack.sizes[0 if stack.transposed else 1] - 1].mul_(_bias_factor(means, damping))
    return updates


def _bias_factor(means: dict[str, Tensor], damping: Tensor | float) -> Tensor:
    """Return the damped inverse ``[B, 1]`` of the A of a bias that is not part of A: the number 1."""
    damping = damping.flatten() if isinstance(damping, Tensor) else damping
    return (1 + ops.factored_damping(means, damping)["A"]).reciprocal()[:, None]


def kronecker_update(layer: Layer, state: LayerState, grad: Tensor, context: StepContext) -> Tensor:
    """Return the preconditioned gradient of one layer that has decompositions."""
    settings = context.settings
    damping = damping_of(layer, state, settings, context.step)
    basis = state.basis()
    if basis is not None and not settings.uses_inverses:
        moments = None
        if state.moments is not None and settings.measures_moments:
            measured = state.moments.weight > 0
            moments = torch.where(measured, state.moments.mean(), ops.spectrum(basis, layer.spec.grad_shape))
        return ops.precondition_eigen(grad, basis, damping=damping, moments=moments)
    inverses = {key: d for key, d in state.decompositions.items() if isinstance(d, Inverse)}
    if len(inverses) < len(state.decompositions):
        inverses = ops.as_inverses(state.decompositions, state.means, damping)
    update = ops.precondition_inverse(grad, inverses)
    if layer.leaves_bias:
        update[..., -1].mul_(_bias_factor(state.means, damping))
    return update
