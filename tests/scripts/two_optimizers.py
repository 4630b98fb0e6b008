"""A second optimizer for a single parameter, which belongs to no module."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = 3 * x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
log_scale = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scale_optimizer = torch.optim.Adam([log_scale], lr=0.05)
# (the one line)
losses = []
for _ in range(25):
    optimizer.zero_grad()
    scale_optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x) * log_scale.exp(), y)
    loss.backward()
    scale_optimizer.step()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
