"""A search for the learning rate first, with a throw-away optimizer; then model and optimizer are begun anew."""

import copy

import torch
from torch import nn


def steps(model, optimizer, x, y, rates):
    losses = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
x = torch.randn(64, 6)
y = x @ torch.randn(6, 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
before = copy.deepcopy(model.state_dict())
rates = [1e-4 * 1.5**i for i in range(16)]
found = steps(model, torch.optim.SGD(model.parameters(), lr=1e-4), x, y, rates)
model.load_state_dict(before)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
# (the one line)
losses = steps(model, optimizer, x, y, [rates[found.index(min(found))]] * 20)
print("loss", losses[0], losses[-1])
