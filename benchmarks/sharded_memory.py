"""What K-FAC holds, and what its part of a step allocates, on each rank of a model that FSDP2 shards.

``torchrun --nproc-per-node P benchmarks/sharded_memory.py`` prints a row of the table in docs/distributed.md: in MiB,
on the rank that has most, K-FAC's state, the statistics of a measured step, and the largest sum of tensors that live at
once within ``optimizer.step()``: of a step that neither measures nor refreshes, and of one that does both.
Intervals are three steps, so that six steps have both kinds; all else is default. ``--out`` adds the row to a JSON.
"""

import argparse
import json
import pathlib
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from environment import write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import dkfac

WIDTH, DEPTH, VOCABULARY, BATCH, LENGTH = 128, 16, 512, 4, 32
MIB = 2**20


class Live(TorchDispatchMode):
    """Follows the tensors that operations make, and the largest sum of their memory."""

    def __init__(self):
        super().__init__()
        self.tensors, self.now, self.peak, self.before = {}, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "device_mesh"):
                self.note(tensor)
        return result

    def note(self, tensor):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() and address not in self.before:
            if address not in self.tensors:
                self.tensors[address] = [0, storage.nbytes()]
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            self.tensors[address][0] += 1
            weakref.finalize(tensor, self.forget, address)

    def forget(self, address):
        entry = self.tensors.get(address)
        if entry is not None:
            entry[0] -= 1
            if entry[0] == 0:
                self.now -= entry[1]
                del self.tensors[address]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON, as benchmarks/results/sharded_memory_cpu.json; default: print only")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, VOCABULARY)
    )
    elements = sum(p.numel() for p in model.parameters())
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kfac = dkfac.KFAC(model, optimizer, announce=False, factor_interval=3, inverse_interval=3, warmup_refresh=None)
    peaks, statistics = [], 0
    for _ in range(6):
        text = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        window = kfac._collector.window.layers.values()
        statistics = max(statistics, sum(t.numel() * t.element_size() for s in window for t in s.factors.values()))
        live = Live()
        with live:
            optimizer.step()
        peaks.append(live.peak)
    state = sum(state.num_bytes() for state in kfac._engine.states.values())
    buffers = sum(stack.buffer.numel() * stack.buffer.element_size() for stack in kfac._engine.stacks)
    mine = torch.tensor([state + buffers, statistics, peaks[-1], peaks[3]], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if rank == 0:
        state, sums, usual, refresh = (mine / MIB).tolist()
        print(f"| {world_size} | {4 * elements / MIB:.1f} | {state:.1f} | {usual:.1f} | {sums:.1f} | {refresh:.1f} |")
        if given.out:
            path = pathlib.Path(given.out)
            rows = json.loads(path.read_text())["rows"] if path.exists() else []
            row = {"ranks": world_size, "parameters": 4 * elements / MIB, "state": state, "ordinary_step": usual}
            row |= {"statistics": sums, "refreshing_step": refresh}
            rows = [r for r in rows if r["ranks"] != world_size] + [{k: round(v, 2) for k, v in row.items()}]
            write(path, {"unit": "MiB", "rows": rows})
    kfac.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
