"""A critic with a gradient penalty: its gradient by the input is differentiated again."""

import torch
from torch import nn

torch.manual_seed(0)
real, fake = torch.randn(64, 3) + 1, torch.randn(64, 3)
model = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# (the one line)
losses = []
for _ in range(30):
    between = torch.lerp(real, fake, torch.rand(64, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss = model(fake).mean() - model(real).mean() + 10 * penalty
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
