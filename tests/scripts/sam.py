"""Sharpness-aware minimization: an optimizer of one's own, with two steps, that calls another one's step."""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / (norm.item() + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


torch.manual_seed(0)
x = torch.randn(90, 6)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
# (the one line)
losses = []
for _ in range(24):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.second_step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
