"""Traces the model before training, as a logger of its graph does; afterwards saves it whole, scripted and traced."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 1, 5, 5)
y = x.flatten(1)[:, :3].argmax(1)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
# (the one line)
torch.jit.trace(model, x[:2])
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
# (the last line)
with torch.no_grad():
    expected = model(x)
    torch.save(model, "model.pt")
    torch.jit.script(model).save("scripted.pt")
    torch.jit.trace(model, x[:2]).save("traced.pt")
    for found in (torch.load("model.pt", weights_only=False), *map(torch.jit.load, ("scripted.pt", "traced.pt"))):
        torch.testing.assert_close(found(x), expected)
print("loss", losses[0], losses[-1])
