"""A moving average of the weights in a deep copy of the model, which is evaluated and saved."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
# (the one line)
average = None
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if average is None:
        average = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for own, new in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.3)
        losses.append(nn.functional.mse_loss(average(x), y).item())
torch.save(average, "average.pt")
torch.jit.script(average).save("average.ts")
print("loss", losses[0], losses[-1])
