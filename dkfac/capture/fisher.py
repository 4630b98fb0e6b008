"""Extra backward passes of the exact (Gauss-Newton) and the sampled Fisher, one per column of the loss Hessian's root.

Input: the model's output and its loss. Output: backward passes, which the collector records. Owns: nothing.

For a loss that is a mean over terms, the Hessian of one term with respect to the model's output is ``S S^T``.
Back-propagating each column of S gives the G of the Gauss-Newton matrix instead of the empirical one. A random column
whose second moment is the Hessian (the gradient at a label drawn from the model's prediction) gives it in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dkfac.capture.collector import Collector
from dkfac.capture.passes import reaches
from dkfac.config.settings import FisherLoss
from dkfac.layers.rows import Sample


def check_output(output: Tensor, loss: FisherLoss, *, by_token: bool) -> None:
    wanted = 3 if by_token else 2
    if output.ndim != wanted and not (loss != "cross-entropy" and output.ndim >= 2):
        shape = "[N, S, classes]" if by_token else "[N, classes]"
        raise ValueError(
            f'fisher_loss={loss!r} with loss_terms="{"token" if by_token else "batch"}" needs a model output of shape '
            f"{shape}, not {list(output.shape)}"
        )


def columns(output: Tensor, loss: FisherLoss, *, by_token: bool) -> Iterator[Tensor]:
    """Yield the columns of S for all terms at once, each with the shape of the output."""
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
    """Return the gradient of each term's loss at a label drawn from the model's prediction, in the shape of the
    output."""
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
    """Return the number of outputs that the loss of one term averages over."""
    return output.shape[-1] if by_token else math.prod(output.shape[1:])


def _sampled(collector: Collector, output: Tensor, loss: FisherLoss, *, by_token: bool) -> Iterator[Tensor]:
    """Yield one column that is zero outside a subset of the examples. It has its own generator, seeded by step, pass
    and rank, so that runs are reproducible and no other random numbers change."""
    step = collector.sample.turn
    generator = torch.Generator(output.device).manual_seed(
        (step * 1009 + collector.window.num_passes) * 65537 + collector.rank
    )
    column = draw(output, loss, generator, by_token=by_token)
    every = min(len(column), round(1 / collector.settings.fisher_fraction))
    if every > 1:
        first = Sample(every, step).offset
        kept = torch.arange(len(column), device=column.device).add_(first) % every == 0
        share = kept.sum().clamp(min=1) / len(column)
        column = column * (kept / share.sqrt()).to(column.dtype).view(-1, *[1] * (column.ndim - 1))
    yield column


def propagate(
    collector: Collector, output: Tensor, edge: GradientEdge, loss: FisherLoss, *, terms: int, by_token: bool
) -> None:
    """Run the extra backward passes, from inside the user's; the collector records them instead of the user's.

    ``edge``: where the output's gradient enters the model's graph; ``terms``: number of loss terms.
    """
    weights = [layer.weight for layer in collector.layers if layer.weight.requires_grad]
    if collector.column is not None or not any(reaches(weight) for weight in weights):
        return
    collector.enter()
    collector.begin_pass(float(terms))
    mask, scale = (
        collector.mask,
        collector.gradient_scale() / collector.terms_of_pass(terms),
    )  # the scale of the loss's own gradient
    passes = _sampled(collector, output, loss, by_token=by_token)
    if collector.settings.fisher == "exact":
        passes = columns(output, loss, by_token=by_token)
    for index, column in enumerate(passes):
        if mask is not None and mask.shape == column.shape[:-1]:
            column = column * mask.to(column).unsqueeze(-1)
        small = (_wide(column) * scale).to(output.dtype)
        with collector.propagating(index):
            torch.autograd.grad(edge, weights, small, retain_graph=True, allow_unused=True)
