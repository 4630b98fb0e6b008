"""Gradual unfreezing: the head first, then layers are thawed, and their parameters are added to the optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
model[:4].requires_grad_(False)
optimizer = torch.optim.AdamW(model[2:].parameters(), lr=0.01)
# (the one line)
losses = []
for step in range(36):
    if step == 12:
        model[2].requires_grad_(True)
    if step == 24:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.005})
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
