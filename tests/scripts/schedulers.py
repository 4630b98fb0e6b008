"""Warm-up, then a cosine; a second scheduler that looks at the loss."""

import torch
from torch import nn
from torch.optim import lr_scheduler

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
warm, cosine = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 25)
scheduler = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [5])
plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
# (the one line)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    plateau.step(loss.detach())
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
