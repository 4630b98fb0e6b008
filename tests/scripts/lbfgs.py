"""LBFGS, which is second order itself."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Linear(6, 2)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
losses = []


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(5):
    losses.append(float(optimizer.step(closure)))
print("loss", losses[0], losses[-1])
