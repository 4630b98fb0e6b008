"""The stages of a step: average, decompose, precondition, rescale. Functions on layers and their states."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac.layers.layer import Layer
from dkfac.ops import precondition as ops
from dkfac.ops.decompose import Decomposition, Eigen, Inverse, mean_eigenvalue, stored
from dkfac.ops.rescale import match_norm
from dkfac.plan.spec import is_input
from dkfac.refresh import Rung, refresh
from dkfac.settings import Settings
from dkfac.stacks import Stack
from dkfac.state import Average, LayerState, carry_moments, mean_of_live, silence_bias

if TYPE_CHECKING:
    from dkfac.run import Runner


class Norms:
    """The norms of the gradients that there are."""

    def __init__(self, parameters: list[Tensor], device: torch.device) -> None:
        found = [(id(p), p.grad._values() if p.grad.is_sparse else p.grad) for p in parameters if p.grad is not None]
        self.place = {number: i for i, (number, _) in enumerate(found)}
        self.values = norms([g for _, g in found], device)

    def are_finite(self, found_inf: Tensor | None) -> Tensor:
        """Whether all are finite, as a tensor. ``found_inf``: what a gradient scaler tells a fused optimizer."""
        good = torch.isfinite(self.values).all()
        return good if found_inf is None else good & (found_inf.to(good.device).reshape(()) == 0)

    def of(self, layers: list[Layer]) -> Tensor:
        """Return the norms of the layers' gradients, ``[layers]``."""
        nothing = len(self.place)
        places = [[self.place.get(id(p), nothing) for p in layer.parameters()] for layer in layers]
        pairs = tuple(place[i] if i < len(place) else nothing for place in places for i in (0, 1))
        index = constant(pairs, self.values.device, torch.int64)
        squares = torch.cat([self.values.square(), self.values.new_zeros(1)])
        return squares[index].view(-1, 2).sum(1).sqrt()


def constant(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the same numbers as a tensor, copied to a device once."""
    found = _constant(numbers, device, dtype)
    if found.is_cuda and torch.cuda.is_current_stream_capturing():
        _IN_GRAPHS.append(found)
    return found


_IN_GRAPHS: list[Tensor] = []
"""Constants whose addresses graphs have: the cache may forget them, the graphs do not."""


@lru_cache(maxsize=1024)
def _constant(numbers: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


def all_finite(named: dict[tuple[str, str], Tensor], device: torch.device) -> Tensor:
    """Whether all factors and moments are finite, as a tensor. A factor with a bad entry has a bad trace."""
    traces = [(t if key == "moments" else mean_eigenvalue(t)).sum().to(device) for (_, key), t in named.items()]
    if not traces:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack([t.to(torch.float64) for t in traces])).all()


def batch_factor(key: str, total: Tensor, rows: Tensor | float, scale: Tensor | float) -> Tensor:
    """Return a batch factor, or moments, from its sum. ``rows``: of the layer's inputs; ``scale``: of G, F, moments."""
    return total / _near(rows, total) if is_input(key) else total * _near(scale, total)


def _near(value: Tensor | float, like: Tensor) -> Tensor | float:
    return value.to(like.device, like.dtype) if isinstance(value, Tensor) else value


def average(
    layer: Layer, state: LayerState, batch: dict[str, Tensor], *, decay: float, good: Tensor, once: Tensor | None = None
) -> None:
    """Absorb a layer's batch factors, and moments, into the running ones unless ``good`` is False.

    ``once``: whether no rank called the layer several times per example, for which moments mean nothing.
    """
    good = good.to(layer.weight.device)
    for key, value in batch.items():
        if key == "moments":
            good = good if once is None else good & once.to(good.device)
            if state.moments is None:
                state.moments = Average.empty(value)
            state.moments.update(value, decay, good)
        else:
            state.running.setdefault(key, Average.empty(value)).update(value, decay, good)


def live_means(layer: Layer, state: LayerState) -> dict[str, Tensor]:
    """Return the mean eigenvalues, per block, of the running factors held here."""
    found = {key: mean_of_live(layer, key, silence_bias(layer, key, r.value)) / r.guarded_weight()
             for key, r in state.running.items()}  # fmt: skip
    if "A_S" in found:
        found["A_S"] = torch.full_like(found["A_S"], 1 / layer.spec.factor("A_S").dim)
    return found


def used(layer: Layer, state: LayerState, key: str) -> Tensor:
    """Return a running factor as it is used: that of a map's positions over its trace, which is its channels' too."""
    factor = silence_bias(layer, key, state.running[key].mean())
    if key != "A_S":
        return factor
    trace = factor.diagonal(dim1=-2, dim2=-1).sum(-1)
    return factor / torch.where(trace > 0, trace, 1.0)[:, None, None]


def decompose(
    layer: Layer, state: LayerState, keys: Iterable[str], settings: Settings, step: int
) -> dict[str, tuple[Decomposition | None, Rung]]:
    """Run factors held here through the guarded ladder; ``state.means`` are this step's. May wait for the device."""
    shifts = ops.factored_damping(state.means, damping_of(layer, state, settings, step))
    found = {}
    for key in keys:
        old, parts = state.decompositions.get(key), pieces(layer, key, settings, step)
        found[key] = refresh(used(layer, state, key), old, settings.solver, shifts[key], parts)
    return found


def pieces(layer: Layer, key: str, settings: Settings, step: int) -> tuple[int, ...]:
    """Return the sizes of the diagonal blocks that a factor is decomposed in at a step."""
    factor = layer.spec.factor(key)
    return factor.widths if step >= settings.split_warmup else (factor.dim,)


def adopt(
    layer: Layer,
    state: LayerState,
    rungs: dict[str, Rung],
    found: dict[str, Decomposition],
    settings: Settings,
    step: int,
) -> None:
    """Note how a layer's decompositions went, on every rank alike, and use from now on what is held here."""
    max_failures, basis_dtype = settings.max_failures, settings.basis_dtype
    old_basis = state.basis()
    for key, rung in rungs.items():
        failed = rung in ("kept", "raw")
        state.failures[key] = state.failures.get(key, 0) + 1 if failed else 0
        if state.failures[key] >= max_failures:
            raise RuntimeError(
                f"factor {key} of layer {layer.name!r} could not be decomposed {state.failures[key]} times in a row "
                f"(max_failures={max_failures}); its running value has a mean eigenvalue of "
                f"{float(state.means[key].mean()):.3g}. More damping, a smaller lr, or skip=[{layer.name!r}] helps."
            )
        if not failed:
            state.decomposed.add(key)
        if not failed and key in found:
            state.decompositions[key] = stored(found[key], basis_dtype)
    state.decomposed_at = step
    if state.moments is not None and any(rungs[key] not in ("kept", "raw") for key in found):
        new_basis = state.basis()
        is_adams = state.momentum is not None  # which goes on in the basis of the weights where there is no other
        if is_adams or (old_basis is not None and new_basis is not None):
            state.moments.value = carry_moments(state.moments, state.momentum, old_basis, new_basis)
        else:
            state.moments = None


ROUNDING = 10.0
"""In units of a type's precision: a mean eigenvalue below its square is that of a gradient that is zero in theory."""


def damping_of(layer: Layer, state: LayerState, settings: Settings, step: int) -> Tensor | float:
    damping = settings.at("norm_damping" if layer.is_norm else "damping", step)
    if settings.damping_mode == "absolute" or damping == 0.0:
        return damping
    product = torch.stack(list(state.means.values())).prod(0).mean()  # of one factor, two or three
    floor = (ROUNDING * torch.finfo(product.dtype).eps) ** 2  # below it, rounding would be divided by rounding
    return damping * torch.where(product < floor, 1.0, product)


def is_dominated(layer: Layer, state: LayerState, settings: Settings, step: int) -> bool:
    """Whether damping exceeds a layer's largest eigenvalue. Waits for the device."""
    basis = state.basis()
    return basis is not None and bool(ops.spectrum(basis).amax() < damping_of(layer, state, settings, step))


def may_round(layer: Layer, state: LayerState, settings: Settings, step: int) -> bool:
    """Whether a layer's gradient may be preconditioned in TF32. Waits for the device."""
    if settings.takes_steps or state.decompositions.keys() != state.means.keys():
        return True
    error = ops.tf32_error(state.decompositions, state.means, damping_of(layer, state, settings, step))
    return bool((error < ops.TF32_TOLERANCE).all())


def is_ready(layer: Layer, state: LayerState) -> bool:
    """Whether all factors have been decomposed once; until then the layer's raw gradient passes."""
    return len(state.decomposed) == len(layer.spec.factors)


def damping_values(settings: Settings, step: int) -> tuple[float, float]:
    """Return the damping of layers and of norm layers at a step."""
    return settings.at("damping", step), settings.at("norm_damping", step)


def stack_damping(stack: Stack, states: dict[str, LayerState], settings: Settings, step: int) -> Tensor | float:
    """Return the damping of layers that are alike: a number, or ``[n * B, 1, 1]``."""
    found = [damping_of(layer, states[layer.name], settings, step) for layer in stack.layers]
    if not isinstance(found[0], Tensor):
        return found[0]
    each = torch.stack([torch.as_tensor(damping) for damping in found])
    return each.repeat_interleave(stack.blocks)[:, None, None]


def is_uniform(joined: dict[str, Decomposition], settings: Settings) -> bool:
    """Whether the factors all have eigenbases and these are to be used, or all have inverses."""
    return {type(d) for d in joined.values()} in ({Inverse}, {Eigen} if settings.solver != "cholesky" else {Inverse})


def directions(stack: Stack, runner: Runner, grads: Tensor) -> Tensor:
    """Return the preconditioned gradients of layers that are alike and ready."""
    joined = stack.decompositions(runner.states)
    assert joined is not None
    if stack.transposed:
        joined = {"A": joined["G"], "G": joined["A"]}
    bases = {key: d for key, d in joined.items() if isinstance(d, Eigen)}
    if bases:
        damping = stack_damping(stack, runner.states, runner.settings, runner.step)
        return ops.precondition_eigen(grads, bases, damping=damping)
    return ops.precondition_inverse(grads, {key: d for key, d in joined.items() if isinstance(d, Inverse)})


def direction(layer: Layer, runner: Runner, grad: Tensor) -> Tensor:
    """Return the preconditioned gradient of one layer that is ready."""
    state, settings = runner.states[layer.name], runner.settings
    damping = damping_of(layer, state, settings, runner.step)
    basis = state.basis()
    if basis is not None and settings.solver != "cholesky":
        moments = None
        if state.moments is not None and settings.curvature == "ekfac":
            measured = state.moments.weight > 0
            moments = torch.where(measured, state.moments.mean(), ops.spectrum(basis))
        return ops.precondition_eigen(grad, basis, damping=damping, moments=moments)
    inverses = {key: d for key, d in state.decompositions.items() if isinstance(d, Inverse)}
    if len(inverses) < len(state.decompositions):
        inverses = ops.as_inverses(state.decompositions, state.means, damping)
    return ops.precondition_inverse(grad, inverses)


def scales(rescale: str, before: Tensor, after: Tensor, sane: Tensor) -> Tensor:
    """Return what each layer's update is multiplied by, ``[layers]``, from the norms before and after.

    Layers that are not ``sane`` (a non-finite update, replaced by the raw gradient) neither count nor change.
    """
    match rescale:
        case "norm":
            factors = match_norm(before, after)
        case "norm-global" | "norm-kl":
            factors = match_norm(_total(before, sane), _total(after, sane))
        case _:
            factors = torch.ones_like(before)
    return torch.where(sane, factors, 1.0)


def _total(norms_of_layers: Tensor, sane: Tensor) -> Tensor:
    return torch.where(sane, norms_of_layers, 0.0).square().sum().sqrt()


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are, dense."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [g._values() if g.is_sparse else g for g in found]


BATCHED = 2**16
"""Elements up to which gradients are zeroed together rather than one by one."""


def zero_where(bad: Tensor, gradients: list[Tensor]) -> None:
    """Set gradients to zero if ``bad``, whatever is in them, with few launches: there may be hundreds."""
    small = [g for g in gradients if g.is_cuda and g.numel() <= BATCHED]
    for gradient in gradients:
        if not gradient.is_cuda or gradient.numel() > BATCHED:
            gradient.masked_fill_(bad.to(gradient.device), 0)
    for place in {(g.device, g.dtype) for g in small}:
        alike = [g for g in small if (g.device, g.dtype) == place]
        joined = torch.cat([g.reshape(-1) for g in alike]).masked_fill_(bad.to(place[0]), 0)
        parts = torch.split(joined, [g.numel() for g in alike])
        torch._foreach_copy_(alike, [part.view(g.shape) for part, g in zip(parts, alike, strict=True)])


def norms(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the Euclidean norm of each, ``[len(tensors)]``, at least in float32, on one device."""
    if not tensors:
        return torch.zeros(0, device=device)
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]  # a norm overflows float16 before its entries
    found = list(torch._foreach_norm(wide))
    if any(n.device != device or n.dtype != found[0].dtype for n in found):
        dtype = torch.float64 if any(n.dtype == torch.float64 for n in found) else torch.float32
        found = [n.to(device, dtype) for n in found]
    return torch.stack(found)
