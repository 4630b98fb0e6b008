"""An encoder and a decoder that no module contains, one optimizer for both."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 8)
encoder = nn.Sequential(nn.Linear(8, 3), nn.Tanh())
decoder = nn.Linear(3, 8)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.02)
# (the one line)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(decoder(encoder(x)), x)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", losses[0], losses[-1])
