"""Gradients of four micro batches are accumulated for each step."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
# (the one line)
losses = []
for _ in range(25):
    optimizer.zero_grad()
    total = 0.0
    for part in range(4):
        rows = slice(16 * part, 16 * part + 16)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows]) / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    losses.append(total)
print("loss", losses[0], losses[-1])
