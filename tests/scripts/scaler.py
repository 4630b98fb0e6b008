"""float16 autocast with a GradScaler, which also unscales before gradients are clipped."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# (the one line)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses = []
for _ in range(25):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
