"""DistributedDataParallel, started by torchrun."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    y = x @ torch.randn(6, 2)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # (the one line)
    losses = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        print("loss", losses[0], losses[-1])
    time.sleep(0.5)  # a thread of torch's releases DDP's last transfer, and aborts if Python is at its end by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
