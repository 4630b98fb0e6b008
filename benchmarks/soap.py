"""A reference implementation of SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024).

For matrices: L and R are averages of ``g g^T`` and ``g^T g``; every ``frequency`` steps their bases take one step of
power iteration and a QR. Momentum is kept in weight space and rotated, the second moment in the basis. The first
gradient only initializes the averages. All other parameters are updated with AdamW's rule.
"""

import torch
from torch import Tensor


class SOAP(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01, frequency=10, max_dim=4096):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "frequency": frequency, "max_dim": max_dim})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group, self.state[p])

    def _step(self, p: Tensor, group: dict, state: dict) -> None:
        (b1, b2), grad = group["betas"], p.grad
        if not state:
            state |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            if p.ndim == 2:
                small = [size <= group["max_dim"] for size in p.shape]
                state["factors"] = [grad @ grad.mT if small[0] else None, grad.mT @ grad if small[1] else None]
                state["bases"] = [None if f is None else torch.linalg.eigh(f).eigenvectors for f in state["factors"]]
                return
        bases = state.get("bases", (None, None))
        state["t"] += 1
        rotated = _rotate(grad, bases)
        state["m"].lerp_(grad, 1 - b1)
        state["v"].mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
        mean = _rotate(state["m"], bases) / (1 - b1 ** state["t"])
        scale = (state["v"] / (1 - b2 ** state["t"])).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(_rotate(mean / scale, bases, back=True), alpha=group["lr"])
        if p.ndim != 2:
            return
        for factor, product in zip(state["factors"], (grad @ grad.mT, grad.mT @ grad), strict=True):
            if factor is not None:
                factor.lerp_(product, 1 - b2)
        if state["t"] % group["frequency"] == 0:
            for i, factor in enumerate(state["factors"]):
                if factor is not None:
                    state["bases"][i] = torch.linalg.qr(factor @ state["bases"][i]).Q


def _rotate(x: Tensor, bases, *, back: bool = False) -> Tensor:
    left, right = bases
    if left is not None:
        x = (left if back else left.mT) @ x
    if right is not None:
        x = x @ (right.mT if back else right)
    return x
