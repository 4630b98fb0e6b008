"""A plain loop with AdamW, in double precision."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 8, dtype=torch.float64)
y = (x @ torch.randn(8, 4, dtype=torch.float64)).argmax(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
# (the one line)
losses = []
for _ in range(30):
    batch = torch.randint(256, (32,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", sum(losses[:5]), sum(losses[-5:]))
