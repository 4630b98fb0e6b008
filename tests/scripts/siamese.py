"""One network that is called on both halves of a pair."""

import torch
import torch.nn.functional as F
from torch import nn


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.score = nn.Linear(4, 1)

    def forward(self, one, other):
        return self.score((self.net(one) - self.net(other)).abs())


torch.manual_seed(0)
one, other = torch.randn(64, 6), torch.randn(64, 6)
same = (one[:, :1] * other[:, :1] > 0).float()
model = Siamese()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
# (the one line)
losses = []
for _ in range(40):
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(one, other), same)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
