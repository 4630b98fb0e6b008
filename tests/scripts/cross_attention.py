"""Attention over keys and values of other widths, and over a memory, beside self-attention."""

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
        self.other = nn.MultiheadAttention(8, 2, kdim=6, vdim=7, batch_first=True)
        self.block = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x, keys, values):
        h = self.query(x)
        h = h + self.other(h, keys, values, need_weights=False)[0]
        return self.head(self.block(h, h).mean(1))


torch.manual_seed(0)
x, keys, values = torch.randn(32, 3, 5), torch.randn(32, 4, 6), torch.randn(32, 4, 7)
y = torch.stack([x.sum((1, 2)), values.mean((1, 2))], 1)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# (the one line)
losses = []
for _ in range(24):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x, keys, values), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
