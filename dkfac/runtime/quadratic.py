"""Step length and momentum from the quadratic model of the loss, with the exact curvature of the batch (Martens 2015).

Input: preconditioned gradients, the last moves and a closure. Output: parameters moved in place. Owns: nothing.

``d = alpha * direction + mu * last`` minimizes the model ``<grad, d> + d^T (F + damping) d / 2`` over alpha and mu. F
is the Gauss-Newton matrix of this batch; each of the two takes one forward-mode pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from dkfac.capture.fisher import check_output, term_width
from dkfac.comm.buffers import vector
from dkfac.comm.transport import Transport
from dkfac.config.settings import FisherLoss, Settings
from dkfac.config.step_context import StepContext
from dkfac.ops.torch_private import load_forward_mode_formulas, reparametrize_module
from dkfac.runtime.levenberg_marquardt import LOSS_ROUNDING, LevenbergMarquardt, buffers_kept

Closure = Callable[[], tuple[Tensor, Tensor]]
"""Returns the loss and the model's output for the batch of the step."""


def check_settings(settings: Settings, *, has_terms: bool = False) -> None:
    """Raise if the settings, or a loss given by ``set_terms`` (``has_terms``), do not fit the quadratic model."""
    if settings.fisher_loss is None:
        raise RuntimeError('quadratic_step needs fisher_loss="cross-entropy", "bernoulli" or "mse": the loss it models')
    if settings.share == "weights":
        raise RuntimeError('quadratic_step needs all gradients on every rank: share="gradients"')
    if settings.rescale != "none" or settings.damping_mode != "absolute" or settings.takes_steps:
        raise RuntimeError(
            'quadratic_step chooses the length itself, with the damping as it is: it goes with rescale="none", '
            'damping_mode="absolute" and curvature="kfac" or "ekfac"'
        )
    if has_terms:
        raise RuntimeError("quadratic_step takes the loss for a mean over all examples or tokens, not set_terms(n)")


def take(
    context: StepContext,
    transport: Transport,
    model: nn.Module,
    parameters: list[Tensor],
    last: dict[int, Tensor],
    precondition: Callable[[], None],
    closure: Closure,
) -> None:
    """Precondition and step; with a Levenberg-Marquardt damping, adapt it every few steps."""
    if transport.plan.sharding is not None:
        raise RuntimeError("quadratic_step needs whole parameters, not shards: use optimizer.step()")
    with warnings.catch_warnings():  # from the import of torch's forward-mode rules
        warnings.simplefilter("ignore", DeprecationWarning)
        load_forward_mode_formulas()
    raw = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    damping, used = context.settings.damping, context.at("damping")
    precondition()
    predicted, before = move(context.settings, transport, model, parameters, raw, last, used, closure)
    if isinstance(damping, LevenbergMarquardt) and context.step % damping.every == 0:
        look(model, transport, damping, predicted, before, closure, parameters[0].device)


def saved(model: nn.Module, last: dict[int, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the last moves by parameter name, if there are any."""
    found = {name: last[id(p)].clone() for name, p in model.named_parameters() if id(p) in last}
    return {"moves": found} if found else {}


def loaded(model: nn.Module, state: dict[str, Any]) -> dict[int, Tensor]:
    moves = state.get("moves", {})
    return {id(p): moves[name].to(p, copy=True) for name, p in model.named_parameters() if name in moves}


def move(
    settings: Settings,
    transport: Transport,
    model: nn.Module,
    parameters: list[Tensor],
    raw: list[Tensor],
    last: dict[int, Tensor],
    damping: float,
    closure: Closure,
) -> tuple[float, float]:
    """Move the parameters, whose gradients are preconditioned. ``last`` maps ``id(parameter)`` to its last move and is
    updated. Returns the change that the model predicts and the loss before. Synchronizes with the device."""
    assert settings.fisher_loss is not None
    directions = [-p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    befores = [last.get(id(p), torch.zeros_like(p)) for p in parameters]
    by_token = settings.loss_terms == "token"
    with torch.no_grad(), buffers_kept(model):
        noise = _Noise(parameters[0].device)
        loss, output = closure()
        check_output(output, settings.fisher_loss, by_token=by_token)
        tangents = []
        for moves in (directions, befores):
            noise.again()
            tangents.append(_pushed(model, parameters, moves, closure))
        noise.again()
    pairs = ((0, 0), (0, 1), (1, 1))
    curved = [_form(output, tangents[i], tangents[j], settings.fisher_loss, by_token=by_token) for i, j in pairs]
    told = transport.total(vector([loss.detach(), *curved], output.device)) / transport.world_size
    dots = [_dot(a, b) for a, b in ((directions, directions), (directions, befores), (befores, befores),
                                   (raw, directions), (raw, befores))]  # fmt: skip
    here = told.device
    plain, first, mixed, second = (*told.tolist(),)
    dd, db, bb, gd, gb = torch.stack([d.to(here) for d in dots]).tolist()
    alpha, mu = solve((first + damping * dd, mixed + damping * db, second + damping * bb), (gd, gb))
    with torch.no_grad():
        for p, direction, before in zip(parameters, directions, befores, strict=True):
            move = alpha * direction + mu * before
            p.add_(move)
            last[id(p)] = move
    return 0.5 * (alpha * gd + mu * gb), plain


def solve(matrix: tuple[float, float, float], gradient: tuple[float, float]) -> tuple[float, float]:
    """Return the minimizer of ``x^T M x / 2 + g^T x``, with M as ``(m00, m01, m11)``; only along the first coordinate
    if the second is degenerate."""
    a, b, c = matrix
    determinant = a * c - b * b
    if a <= 0 or not math.isfinite(a):
        return 0.0, 0.0
    if c <= 0 or determinant <= 1e-10 * a * c:
        return -gradient[0] / a, 0.0
    return (b * gradient[1] - c * gradient[0]) / determinant, (b * gradient[0] - a * gradient[1]) / determinant


def look(
    model: nn.Module, transport: Transport, damping: LevenbergMarquardt, predicted: float, before: float,
    closure: Closure, device: torch.device,
) -> None:  # fmt: skip
    """Adapt the damping to the loss after the step."""
    with torch.no_grad(), buffers_kept(model):
        after = transport.total(vector([closure()[0].detach()], device)) / transport.world_size
    noise = LOSS_ROUNDING * torch.finfo(torch.float32).eps * abs(before)
    damping.look(float(after) - before, predicted, noise)


class _Noise:
    """Saves the random number generators' states, so that several forward passes use the same dropout masks."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu = device, torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def again(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def _pushed(model: nn.Module, parameters: list[Tensor], moves: list[Tensor], closure: Closure) -> Tensor:
    """Return the directional derivative of the output along the moves."""
    move_of = {id(p): move for p, move in zip(parameters, moves, strict=True)}
    with forward_ad.dual_level():
        dual = {
            name: forward_ad.make_dual(p.detach(), move_of[id(p)])  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in move_of
        }
        with reparametrize_module(model, dual):
            output = closure()[1]
        tangent = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
        return torch.zeros_like(output) if tangent is None else tangent.clone()


def _form(output: Tensor, a: Tensor, b: Tensor, loss: FisherLoss, *, by_token: bool) -> Tensor:
    """Return ``a^T H b`` averaged over terms, where H is the Hessian of one term's loss with respect to the output."""
    z, a, b = (t.detach().double() for t in (output, a, b))
    terms = math.prod(z.shape[:2]) if by_token else z.shape[0]
    match loss:
        case "cross-entropy":
            p = z.softmax(-1)
            mean = (p * a).sum(-1) * (p * b).sum(-1)
            return ((p * a * b).sum() - mean.sum()) / terms
        case "bernoulli":
            p = z.sigmoid()
            return (p * (1 - p) * a * b).sum() / (terms * term_width(output, by_token))
        case "mse":
            return 2 * (a * b).sum() / (terms * term_width(output, by_token))


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x.double() * y.double()).sum().to(a[0].device) for x, y in zip(a, b, strict=True)]).sum()
