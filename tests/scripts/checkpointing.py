"""Activations are computed again in the backward pass, in both ways that torch has."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(12, 2)

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(i))
        return self.last(x)


torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# (the one line)
losses = []
for _ in range(25):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
