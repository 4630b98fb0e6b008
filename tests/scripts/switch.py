"""Adam first, then SGD over the same parameters. Both are built at the beginning."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
adam = torch.optim.Adam(model.parameters(), lr=0.02)
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for step in range(24):
    optimizer = adam if step < 12 else sgd
    # (the one line)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
