"""The optimizer is given a closure that computes the loss."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# (the one line)
losses = []


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(25):
    losses.append(float(optimizer.step(closure)))
print("loss", losses[0], losses[-1])
