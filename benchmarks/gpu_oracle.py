"""K-FAC in float64 for one layer, directly from the formulas: the reference of ``gpu_accuracy.py``.

For convolutions without groups and Linear layers with one row per example. A: ``[I, I]``, G: ``[O, O]``, gradients
``[O, I]``; features in the order of the weight, the bias last.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIECE = 2**27
"""Patches are formed for so many examples at a time that they have at most this many elements."""


class Recorder:
    """Plain hooks that keep what chosen layers saw, in the precision they ran in, and the gradient of their output."""

    def __init__(self, layers: list) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.handles = [layer.module.register_forward_hook(self._hook(layer.name)) for layer in layers]

    def _hook(self, name: str):
        def hook(_module, inputs, output) -> None:
            self.seen[name] = [inputs[0].detach().to(output.dtype)]
            output.register_hook(lambda gradient: self.seen[name].append(gradient.detach()))

        return hook

    def close(self) -> dict[str, list[Tensor]]:
        for handle in self.handles:
            handle.remove()
        return self.seen


def factors_of(module: nn.Module, x: Tensor, g: Tensor, terms: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Return A and G in float64, straight from the formulas; features in the order of the weight, the bias last."""
    bias = module.bias is not None
    if isinstance(module, nn.Conv2d):
        assert module.groups == 1
        assert module.padding_mode == "zeros"
        form = (module.kernel_size, module.dilation, module.padding, module.stride)
        per_example = module.weight[0].numel() * g[0, 0].numel()
    else:
        assert isinstance(module, nn.Linear)
        assert x.ndim == 2
        per_example = x.shape[1]
    size = module.weight[0].numel() + bias
    a = torch.zeros(size, size, dtype=torch.float64, device=x.device)
    b = torch.zeros(len(module.weight), len(module.weight), dtype=torch.float64, device=x.device)
    num_rows = 0
    for part, grad in zip(*(t.split(max(1, PIECE // per_example)) for t in (x, g)), strict=True):
        rows, grads = part.double(), grad.double()
        if isinstance(module, nn.Conv2d):
            rows = F.unfold(rows.contiguous(), *form).mT.reshape(-1, size - bias)
            grads = grads.flatten(2).mT.reshape(-1, len(b))
        if bias:
            rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        assert len(rows) == len(grads)
        a += rows.mT @ rows
        b += grads.mT @ grads
        num_rows += len(rows)
    return a / num_rows, b * (terms * ratio)


class Oracle:
    """Float64 answers for one layer from its factors, decomposed once."""

    def __init__(self, a: Tensor, g: Tensor, damping: float) -> None:
        self.a, self.g, self.damping = a, g, damping
        self.mean_a, self.mean_g = (float(f.diagonal().mean()) for f in (a, g))
        self.bases: list[tuple[Tensor, Tensor]] | None = None

    def solve(self, grad: Tensor, solver: str, mode: str) -> Tensor:
        """Return the preconditioned gradient ``[O, I]``."""
        damping = self.damping * (self.mean_a * self.mean_g if mode == "relative" else 1.0)
        if solver == "eigen":
            self.bases = self.bases or [torch.linalg.eigh(f) for f in (self.g, self.a)]
            (d_g, q_g), (d_a, q_a) = self.bases
            return q_g @ ((q_g.mT @ grad @ q_a) / (d_g[:, None] * d_a + damping)) @ q_a.mT
        pi = (self.mean_a / self.mean_g) ** 0.5 if self.mean_a > 0 and self.mean_g > 0 else 1.0
        left, right = shifted(self.g, damping**0.5 / pi), shifted(self.a, damping**0.5 * pi)
        half = torch.cholesky_solve(grad, torch.linalg.cholesky(left))
        return torch.cholesky_solve(half.mT.contiguous(), torch.linalg.cholesky(right)).mT


def shifted(factor: Tensor, shift: float) -> Tensor:
    return factor + shift * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)


def gradient(module: nn.Module) -> Tensor:
    """Return the gradient as ``[O, I]`` in float64, the bias last."""
    parts = [module.weight.grad.flatten(1)]
    if module.bias is not None:
        parts.append(module.bias.grad[:, None])
    return torch.cat(parts, dim=1).double()


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def cosine(found: Tensor, wanted: Tensor) -> float:
    return float((found * wanted).sum() / (found.norm() * wanted.norm()))
