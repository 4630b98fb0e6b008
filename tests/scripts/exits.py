"""Ends itself with a status, as a script does that stops early."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# (the one line)
losses = []
while True:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if len(losses) == 20:
        print("loss", losses[0], losses[-1])
        sys.exit(7)
