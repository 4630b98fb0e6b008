"""A VAE whose loss is a sum over the batch, divided by nothing."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.log_var = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.decode, self.out = nn.Linear(3, 16), nn.Linear(16, 12)

    def forward(self, x):
        h = F.relu(self.encode(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return torch.sigmoid(self.out(F.relu(self.decode(z)))), mean, log_var


torch.manual_seed(0)
x = (torch.randn(64, 3) @ torch.randn(3, 12)).sigmoid()
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
# (the one line)
losses = []
for _ in range(40):
    optimizer.zero_grad()
    found, mean, log_var = model(x)
    loss = F.binary_cross_entropy(found, x, reduction="sum")
    loss = loss - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
