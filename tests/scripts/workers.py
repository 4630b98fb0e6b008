"""A DataLoader with worker processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x[:2].sin()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    # (the one line)
    losses = []
    for _ in range(4):
        for x, y in DataLoader(Points(), batch_size=16, shuffle=True, num_workers=2):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print("loss", sum(losses[:4]), sum(losses[-4:]))


if __name__ == "__main__":
    main()
