"""The damping of a layer at a step, and the checks that depend on it.

Input: settings, the step and a layer's mean eigenvalues. Output: damping values and decisions. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.config.settings import Settings
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer
from dkfac.ops import precondition as ops
from dkfac.plan.spec import whole_key

MEAN_ROUNDING = 10.0
"""In units of the dtype's machine epsilon. A product of mean eigenvalues below the square of this is rounding error of
a gradient that is zero in exact arithmetic."""


def damping_of(layer: Layer, state: LayerState, settings: Settings, step: int) -> Tensor | float:
    """Return a layer's damping at a step: a number, or a scalar tensor if ``damping_mode="relative"``."""
    damping = settings.at("norm_damping" if layer.is_norm else "damping", step)
    if settings.damping_mode == "absolute" or damping == 0.0:
        return damping
    whole = [mean for key, mean in state.means.items() if key == whole_key(key)]
    product = torch.stack(whole).prod(0).mean()  # over one, two or three factors
    floor = (MEAN_ROUNDING * torch.finfo(product.dtype).eps) ** 2  # below it, both are only rounding error
    return damping * torch.where(product < floor, 1.0, product)


def is_dominated(layer: Layer, state: LayerState, settings: Settings, step: int) -> bool:
    """Whether the damping exceeds a layer's largest eigenvalue. Synchronizes with the device."""
    basis = state.basis()
    return basis is not None and bool(
        ops.spectrum(basis, layer.spec.grad_shape).amax() < damping_of(layer, state, settings, step)
    )


def may_round(layer: Layer, state: LayerState, settings: Settings, step: int) -> bool:
    """Whether a layer's gradient may be preconditioned in TF32. Synchronizes with the device."""
    if settings.takes_steps or state.decompositions.keys() != state.means.keys():
        return True
    damping = damping_of(layer, state, settings, step)
    error = ops.tf32_error(state.decompositions, state.means, damping, layer.spec.grad_shape)
    return bool((error < ops.TF32_TOLERANCE).all())


def damping_values(settings: Settings, step: int) -> tuple[float, float]:
    """Return the damping of ordinary layers and of norm layers at a step."""
    return settings.at("damping", step), settings.at("norm_damping", step)


def stack_damping(stack: Stack, states: dict[str, LayerState], settings: Settings, step: int) -> Tensor | float:
    """Return the damping of a stack's layers: one number, or a tensor ``[n * B, 1, 1]``."""
    found = [damping_of(layer, states[layer.name], settings, step) for layer in stack.layers]
    if not isinstance(found[0], Tensor):
        return found[0]
    each = torch.stack([torch.as_tensor(damping) for damping in found])
    return each.repeat_interleave(stack.blocks)[:, None, None]
