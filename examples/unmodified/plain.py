"""A plain training loop: a small network on handwritten digits. It knows nothing of second-order methods."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(epochs):
    model.train()
    for index in torch.randperm(1400).split(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
    print(f"epoch {epoch + 1}: training loss {loss:.4f}, test accuracy {accuracy:.3f}")
