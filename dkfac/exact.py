"""The exact Fisher (Gauss-Newton): backward passes of the columns of the loss Hessian's root.

For a loss that is a mean over terms, the Hessian of one term with respect to the model's output is
``S S^T``. Propagating each column of S gives the G of the Gauss-Newton matrix instead of the empirical one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dkfac.engine import reaches
from dkfac.settings import ExactLoss
from dkfac.tape import Tape


def check_output(output: Tensor, loss: ExactLoss, *, by_token: bool) -> None:
    wanted = 3 if by_token else 2
    if output.ndim != wanted and not (loss == "mse" and output.ndim >= 2):
        shape = "[N, S, classes]" if by_token else "[N, classes]"
        raise ValueError(
            f'fisher="exact" with exact_loss={loss!r} and loss_terms="{"token" if by_token else "batch"}" needs a '
            f"model output of shape {shape}, not {list(output.shape)}"
        )


def columns(output: Tensor, loss: ExactLoss, *, by_token: bool) -> Iterator[Tensor]:
    """Yield the columns of S for all terms at once, each shaped like the output."""
    if loss == "cross-entropy":
        p = output.detach().float().softmax(-1) if output.dtype.itemsize < 4 else output.detach().softmax(-1)
        for c in range(output.shape[-1]):
            column = -p * p[..., c : c + 1].sqrt()
            column[..., c] += p[..., c].sqrt()
            yield column.to(output.dtype)
        return
    width = output.shape[-1] if by_token else math.prod(output.shape[1:])
    for c in range(width):
        column = torch.zeros_like(output)
        (column if by_token else column.reshape(output.shape[0], -1))[..., c] = math.sqrt(2 / width)
        yield column


def propagate(tape: Tape, output: Tensor, edge: GradientEdge, loss: ExactLoss, *, terms: int, by_token: bool) -> None:
    """Run the extra backward passes, from inside the user's; the tape records them instead of the user's.

    ``edge``: where the output's gradient enters the model's graph; ``terms``: of the loss.
    """
    weights = [layer.weight for layer in tape.layers if layer.weight.requires_grad]
    if tape.column is not None or not any(reaches(weight) for weight in weights):
        return
    tape.enter()
    tape.begin_pass(float(terms))
    mask, scale = tape.mask, tape.gradient_scale()
    try:
        for index, column in enumerate(columns(output, loss, by_token=by_token)):
            if mask is not None and mask.shape == column.shape[:-1]:
                column = column * mask.to(column).unsqueeze(-1)
            tape.column = index
            torch.autograd.grad(edge, weights, column * scale, retain_graph=True, allow_unused=True)
    finally:
        tape.column = None
