"""DistributedDataParallel in processes that the script starts with torch.multiprocessing.spawn."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    weight = torch.randn(6, 2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    # (the one line)
    torch.manual_seed(rank)
    x = torch.randn(32, 6)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x @ weight)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print("loss", losses[0], losses[-1], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(2, os.path.join(folder, "store")), nprocs=2)
