"""Step length and momentum from the quadratic model of the loss, with the exact curvature of the batch (Martens 2015).

``d = alpha * direction + mu * last``, alpha and mu those at which the model ``<grad, d> + d^T (F + damping) d / 2`` is
least. F is the Gauss-Newton matrix of this batch, which takes one forward-mode pass for each of the two.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.stateless import _reparametrize_module

from dkfac.comm import collectives
from dkfac.exact import check_output, term_width
from dkfac.exchange import vector
from dkfac.settings import FisherLoss, Settings
from dkfac.trust import ROUNDING, LevenbergMarquardt, buffers_kept, check_unscaled

if TYPE_CHECKING:
    from dkfac.run import Runner

Closure = Callable[[], tuple[Tensor, Tensor]]
"""Returns the loss and the model's output of the step's batch."""


def check(settings: Settings) -> None:
    if settings.fisher_loss is None:
        raise RuntimeError('quadratic_step needs fisher_loss="cross-entropy", "bernoulli" or "mse": the loss it models')
    if settings.share == "weights":
        raise RuntimeError('quadratic_step needs all gradients on every rank: share="gradients"')
    if settings.rescale != "none" or settings.damping_mode != "absolute" or settings.takes_steps:
        raise RuntimeError(
            'quadratic_step chooses the length itself, with the damping as it is: it goes with rescale="none", '
            'damping_mode="absolute" and curvature="kfac" or "ekfac"'
        )


def take(
    runner: Runner,
    model: nn.Module,
    parameters: list[Tensor],
    last: dict[int, Tensor],
    precondition: Callable[[], None],
    closure: Closure,
    optimizer: Any,
) -> None:
    """Precondition and step; with a Levenberg-Marquardt damping also look at the loss again, every few steps."""
    check(runner.settings)
    check_unscaled(runner.tape.scaler, optimizer)
    if runner.tape.terms is not None or runner.tape.pending_terms is not None:
        raise RuntimeError("quadratic_step takes the loss for a mean over all examples or tokens, not set_terms(n)")
    with warnings.catch_warnings():  # of torch's own, where it first needs forward-mode rules
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    raw = [p.grad.detach().clone() for p in parameters if p.grad is not None]
    damping, number = runner.settings.damping, runner.step
    used = runner.settings.at("damping", number)
    precondition()
    predicted, before = step(runner, model, parameters, raw, last, used, closure)
    if isinstance(damping, LevenbergMarquardt) and number % damping.every == 0:
        look(model, runner, damping, predicted, before, closure)


def saved(model: nn.Module, last: dict[int, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the last moves by the parameters' names, if there are any."""
    found = {name: last[id(p)].clone() for name, p in model.named_parameters() if id(p) in last}
    return {"moves": found} if found else {}


def loaded(model: nn.Module, state: dict[str, Any]) -> dict[int, Tensor]:
    moves = state.get("moves", {})
    return {id(p): moves[name].to(p, copy=True) for name, p in model.named_parameters() if name in moves}


def step(
    runner: Runner,
    model: nn.Module,
    parameters: list[Tensor],
    raw: list[Tensor],
    last: dict[int, Tensor],
    damping: float,
    closure: Closure,
) -> tuple[float, float]:
    """Move the parameters, whose gradients are preconditioned; returns the change that the model predicts and the loss
    before. ``last``: their last moves by id, which become these."""
    settings = runner.settings
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
    told = vector([loss.detach(), *curved], output.device)
    if runner.exchange is not None:
        told = collectives.all_reduce(told, runner.exchange.groups.everyone).wait() / runner.plan.world_size
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
    """Return where ``x^T M x / 2 + g^T x`` is least; along the first alone where the second adds nothing."""
    a, b, c = matrix
    determinant = a * c - b * b
    if a <= 0 or not math.isfinite(a):
        return 0.0, 0.0
    if c <= 0 or determinant <= 1e-10 * a * c:
        return -gradient[0] / a, 0.0
    return (b * gradient[1] - c * gradient[0]) / determinant, (b * gradient[0] - a * gradient[1]) / determinant


def look(
    model: nn.Module, runner: Runner, damping: LevenbergMarquardt, predicted: float, before: float, closure: Closure
) -> None:
    """Change the damping by what the loss is now."""
    with torch.no_grad(), buffers_kept(model):
        after = vector([closure()[0].detach()], runner.layers[0].weight.device)
    if runner.exchange is not None:
        after = collectives.all_reduce(after, runner.exchange.groups.everyone).wait() / runner.plan.world_size
    noise = ROUNDING * torch.finfo(torch.float32).eps * abs(before)
    damping.look(float(after) - before, predicted, noise)


class _Noise:
    """Random numbers, as of dropout, that are to be the same in several forward passes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu = device, torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def again(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def _pushed(model: nn.Module, parameters: list[Tensor], moves: list[Tensor], closure: Closure) -> Tensor:
    """Return how the output changes along the moves."""
    move_of = {id(p): move for p, move in zip(parameters, moves, strict=True)}
    with forward_ad.dual_level():
        dual = {
            name: forward_ad.make_dual(p.detach(), move_of[id(p)])  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in move_of
        }
        with _reparametrize_module(model, dual):
            output = closure()[1]
        tangent = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
        return torch.zeros_like(output) if tangent is None else tangent.clone()


def _form(output: Tensor, a: Tensor, b: Tensor, loss: FisherLoss, *, by_token: bool) -> Tensor:
    """Return ``a^T H b`` in the mean over terms, H the Hessian of a term's loss."""
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
