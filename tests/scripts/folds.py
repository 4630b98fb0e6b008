"""Cross-validation: a new model and a new optimizer for each fold."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(90, 6)
y = x @ torch.randn(6, 1)
begin, end = 0.0, 0.0
for fold in range(3):
    train = torch.tensor([i for i in range(90) if i % 3 != fold])
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # (the one line)
    for step in range(15):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[train]), y[train])
        loss.backward()
        optimizer.step()
        begin += loss.item() if step == 0 else 0.0
    end += loss.item()
print("loss", begin, end)
