"""DistributedDataParallel under torchrun, with a sampler and AdamW, on handwritten digits."""

import gc
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank: int, epochs: int) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    data = TensorDataset(x[:1400], y[:1400])
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=200 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {loss:.4f}, test accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    gc.collect()  # a process group that something still holds may abort the exit
    dist.destroy_process_group()
