"""A small GPT with tied weights, parameter groups, clipping; saves model and optimizer, and resumes from there.

Arguments: the number of the last step, and "resume".
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words=16, dim=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, dim), nn.Embedding(8, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


last, resume = int(sys.argv[1]), "resume" in sys.argv
torch.manual_seed(0)
model = GPT()
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95))
begin = 0
if resume:
    checkpoint = torch.load("ckpt.pt", map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    begin = checkpoint["step"]
    checkpoint = None
# (the one line)
losses = []
for step in range(begin, last):
    rows = torch.randint(16, (12, 1), generator=torch.Generator().manual_seed(step))
    tokens = (rows + 3 * torch.arange(9)) % 16
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": last}, "ckpt.pt")
print("loss", losses[0], losses[-1])
