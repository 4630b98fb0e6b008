"""The exact Fisher (Gauss-Newton) and the sampled one: backward passes of the columns of the loss Hessian's root.

For a loss that is a mean over terms, the Hessian of one term with respect to the model's output is
``S S^T``. Propagating each column of S gives the G of the Gauss-Newton matrix instead of the empirical one; one
random column whose mean square is the Hessian, the gradient of a label that the model draws itself, gives it in the
mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dkfac.engine import reaches
from dkfac.layers.rows import Sample
from dkfac.settings import FisherLoss
from dkfac.tape import Tape


def check_output(output: Tensor, loss: FisherLoss, *, by_token: bool) -> None:
    wanted = 3 if by_token else 2
    if output.ndim != wanted and not (loss != "cross-entropy" and output.ndim >= 2):
        shape = "[N, S, classes]" if by_token else "[N, classes]"
        raise ValueError(
            f'fisher_loss={loss!r} with loss_terms="{"token" if by_token else "batch"}" needs a model output of shape '
            f"{shape}, not {list(output.shape)}"
        )


def columns(output: Tensor, loss: FisherLoss, *, by_token: bool) -> Iterator[Tensor]:
    """Yield the columns of S for all terms at once, each shaped like the output."""
    wide = _wide(output)
    if loss == "cross-entropy":
        p = wide.softmax(-1)
        for c in range(output.shape[-1]):
            column = -p * p[..., c : c + 1].sqrt()
            column[..., c] += p[..., c].sqrt()
            yield column.to(output.dtype)
        return
    width = term_width(output, by_token)
    root = torch.full_like(wide, math.sqrt(2 / width))
    if loss == "bernoulli":
        p = wide.sigmoid()
        root = (p * (1 - p) / width).sqrt()
    for c in range(width):
        column = torch.zeros_like(root)
        flat, values = (t if by_token else t.view(t.shape[0], -1) for t in (column, root.contiguous()))
        flat[..., c] = values[..., c]
        yield column.to(output.dtype)


def draw(output: Tensor, loss: FisherLoss, generator: torch.Generator, *, by_token: bool) -> Tensor:
    """Return the gradient of each term's loss at a label drawn from the model's prediction, shaped like the output."""
    wide = _wide(output)
    match loss:
        case "cross-entropy":
            p = wide.softmax(-1)
            labels = torch.multinomial(p.flatten(0, -2), 1, replacement=True, generator=generator)
            column = p - torch.zeros_like(p).flatten(0, -2).scatter_(1, labels, 1.0).view_as(p)
        case "bernoulli":
            p = wide.sigmoid()
            column = (p - torch.bernoulli(p, generator=generator)) / math.sqrt(term_width(output, by_token))
        case "mse":
            noise = torch.empty_like(wide).normal_(generator=generator)
            column = noise * math.sqrt(2 / term_width(output, by_token))
    return column.to(output.dtype)


def _wide(output: Tensor) -> Tensor:
    return output.detach().float() if output.dtype.itemsize < 4 else output.detach()


def term_width(output: Tensor, by_token: bool) -> int:
    """Return how many outputs the loss of a term is a mean of."""
    return output.shape[-1] if by_token else math.prod(output.shape[1:])


def _sampled(tape: Tape, output: Tensor, loss: FisherLoss, *, by_token: bool) -> Iterator[Tensor]:
    """Yield one column, zero but for some of the examples. Its randomness is its own: it follows from step, pass and
    rank, so that a run repeats, and nobody else's random numbers change."""
    step = tape.sample.turn
    generator = torch.Generator(output.device).manual_seed((step * 1009 + tape.window.num_passes) * 65537 + tape.rank)
    column = draw(output, loss, generator, by_token=by_token)
    every = min(len(column), round(1 / tape.settings.fisher_fraction))
    if every > 1:
        first = Sample(every, step).offset
        kept = torch.arange(len(column), device=column.device).add_(first) % every == 0
        share = kept.sum().clamp(min=1) / len(column)
        column = column * (kept / share.sqrt()).to(column.dtype).view(-1, *[1] * (column.ndim - 1))
    yield column


def propagate(tape: Tape, output: Tensor, edge: GradientEdge, loss: FisherLoss, *, terms: int, by_token: bool) -> None:
    """Run the extra backward passes, from inside the user's; the tape records them instead of the user's.

    ``edge``: where the output's gradient enters the model's graph; ``terms``: of the loss.
    """
    weights = [layer.weight for layer in tape.layers if layer.weight.requires_grad]
    if tape.column is not None or not any(reaches(weight) for weight in weights):
        return
    tape.enter()
    tape.begin_pass(float(terms))
    mask, scale = tape.mask, tape.gradient_scale() / tape.terms_of_pass(terms)  # as small as the loss's own gradient
    try:
        passes = _sampled(tape, output, loss, by_token=by_token)
        if tape.settings.fisher == "exact":
            passes = columns(output, loss, by_token=by_token)
        for index, column in enumerate(passes):
            if mask is not None and mask.shape == column.shape[:-1]:
                column = column * mask.to(column).unsqueeze(-1)
            tape.column = index
            small = (_wide(column) * scale).to(output.dtype)
            torch.autograd.grad(edge, weights, small, retain_graph=True, allow_unused=True)
    finally:
        tape.column = None
