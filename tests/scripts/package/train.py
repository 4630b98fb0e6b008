"""A module of a package, started with ``-m``: it imports its neighbour relatively."""

import sys

import torch
from torch import nn

from .model import build

assert __name__ == "__main__"
assert sys.argv[1:] == ["--rate", "0.1"], sys.argv
torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
# (the one line)
losses = []
for _ in range(25):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
