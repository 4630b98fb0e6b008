"""A GAN that freezes each network while the other one learns; the generator, whose loss passes the other, is first."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

torch.manual_seed(0)
real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
# (the one line)
ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
distances = []
for _ in range(60):
    discriminator.requires_grad_(False)
    fake = generator(torch.randn(64, 4))
    optimizer_g.zero_grad()
    bce(discriminator(fake), ones).backward()
    optimizer_g.step()
    discriminator.requires_grad_(True)
    generator.requires_grad_(False)
    both = discriminator(torch.cat([real, generator(torch.randn(64, 4))]))
    optimizer_d.zero_grad()
    bce(both, torch.cat([ones, zeros])).backward()
    optimizer_d.step()
    generator.requires_grad_(True)
    distances.append((fake.mean(0) - real.mean(0)).norm().item())
print("loss", distances[0], distances[-1])
