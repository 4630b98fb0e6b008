"""Networks, FSDP2 and a training loop, for a sharded model and for the same one on one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dkfac import KFAC

STEPS, BATCH, WORDS, LENGTH = 20, 24, 11, 6
OFTEN = {"announce": False, "factor_interval": 2, "inverse_interval": 4, "warmup_refresh": None}


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.recomputed = heads, False
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputed else self.run(x)

    def run(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Attention(nn.Module):
    """Weights that a function applies."""

    def __init__(self, width=8):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.mixing = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(x + self.mixing(x, x, x, need_weights=False)[0])


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.Tanh(), nn.Conv2d(5, 4, 3, groups=1, bias=False),
        nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


NETS = {"gpt": GPT, "cnn": cnn}


def build(name):
    torch.manual_seed(3)
    return NETS[name]().double()


def batch(name, step):
    given = torch.Generator().manual_seed(100 + step)
    if name == "gpt":
        text = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=given)
        return text[:, :-1], text[:, 1:]
    x = torch.randn(BATCH, 2, 6, 6, generator=given, dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 1).long()


def loss_of(name, output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten()) if name == "gpt" else F.cross_entropy(output, target)


def parts_of(model):
    """The modules that are sharded by themselves, before the whole."""
    return list(model.blocks) if isinstance(model, GPT) else [model[0], model[3]]


def shard(model, *, hsdp=False, **how):
    """Apply FSDP2, or HSDP with two replicas."""
    if hsdp:
        how["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    for part in parts_of(model):
        fully_shard(part, **how)
    return fully_shard(model, **how)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.01, maximize=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=0.03),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.03),
    "old": lambda p: torch.optim.AdamW([nn.Parameter(q.full_tensor().detach()) for q in p]),
    "groups": lambda p: torch.optim.SGD(
        [{"params": [q for q in p if q.ndim > 1]}, {"params": [q for q in p if q.ndim < 2], "lr": 0.01}],
        lr=0.03, momentum=0.9,
    ),
}  # fmt: skip


def attach(model, optimizer, **options):
    own = OPTIMIZERS[optimizer](list(model.parameters()))
    return own, KFAC(model, own, **(OFTEN | options))


def alone():
    """A group of this rank alone, in which one process trains."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def train(model, name, own, steps=STEPS, rank=0, world_size=1, micro=1):
    """Train on a rank's share of the batches, in ``micro`` backward passes each; return the losses."""
    losses = []
    for step in steps if isinstance(steps, range) else range(steps):
        x, y = (whole[rank::world_size] for whole in batch(name, step))
        own.zero_grad()
        for i, (a, b) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == micro - 1)
            loss = loss_of(name, model(a), b) / micro
            loss.backward()
        own.step()
        losses.append(loss.item())
    return losses


def whole(model):
    with torch.no_grad():
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in model.parameters()]


def difference(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def both(name, optimizer, options, *, hsdp=False, micro=1, change=None, how=None):
    """Train a sharded model and one process; return by how much their weights differ, and the sharded K-FAC."""
    rank, world = dist.get_rank(), dist.get_world_size()
    single = build(name)
    own, kfac = attach(single, optimizer, process_group=alone(), **options)
    train(single, name, own, micro=micro)
    kfac.close()
    model = build(name)
    if change is not None:
        change(model)
    shard(model, hsdp=hsdp, **(how or {}))
    own, kfac = attach(model, optimizer, **options)
    train(model, name, own, rank=rank, world_size=world, micro=micro)
    return difference(whole(model), whole(single)), kfac
