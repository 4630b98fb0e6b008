"""Epochs over a loader with an evaluation after each, batch norm and dropout."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.head(self.drop(x.flatten(1))), dim=1)


def train(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()


def evaluate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += F.nll_loss(model(x), y, reduction="sum").item()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(0)
    images = torch.randn(120, 1, 8, 8)
    labels = images.flatten(1)[:, :3].argmax(1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=30, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # (the one line)
    first = evaluate(model, loader)
    for _ in range(6):
        train(model, loader, optimizer)
        last = evaluate(model, loader)
    print("loss", first, last)


if __name__ == "__main__":
    main()
