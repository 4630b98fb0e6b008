"""An ordinary training script with one added line: K-FAC preconditions the optimizer's steps.

python examples/one_line.py [EPOCHS]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import dkfac

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5

pixels, labels = load_digits(return_X_y=True)
images = (torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) - 5) / 6
targets = torch.from_numpy(labels).long()

torch.manual_seed(0)
order = torch.randperm(len(targets))
train, test = order[400:], order[:400]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=epochs)

dkfac.KFAC(model, optimizer)  # the one added line

for epoch in range(epochs):
    for batch in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), targets[batch])
        loss.backward()
        optimizer.step()
    scheduler.step()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == targets[test]).float().mean()
    print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.1%}")
