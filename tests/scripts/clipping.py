"""Gradients are clipped by norm and by value; a convolution in one dimension."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(48, 2, 16)
y = x.mean((1, 2), keepdim=False)
model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(24, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
# (the one line)
losses = []
for _ in range(30):
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.smooth_l1_loss(model(x).squeeze(1), y)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
