"""Two groups: weight decay for matrices, none for the rest; each with its learning rate."""

import torch
from torch import nn

torch.manual_seed(0)
tokens = torch.randint(12, (32, 6))
model = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12))
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.005}]
optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
# (the one line)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
