"""K-FAC without an optimizer: precondition the gradients, inspect them, and apply the update yourself.

python examples/by_hand.py [STEPS]
"""

import sys

import torch
from torch import nn

import dkfac

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200

# Inputs whose directions differ in size by a factor of 100: slow for plain gradients.
torch.manual_seed(0)
inputs = torch.randn(1024, 20) * torch.logspace(-2, 0, 20)
teacher = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
with torch.no_grad():
    teacher[0].weight /= inputs.std(0)
    targets = teacher(inputs)


def train(lr: float, second_order: bool) -> float:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    # The KL clip bounds how far the predictions move in a step, so it needs to know the learning rate.
    kfac = dkfac.KFAC(model, damping=1e-3, rescale="kl-clip", kl_clip=1e-2) if second_order else None
    for step in range(steps):
        batch = torch.randint(len(inputs), (128,))
        model.zero_grad()
        nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        rate = lr * (1 - step / steps)
        if kfac is not None:
            kfac.step(lr=rate)  # the gradients are preconditioned from here on
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    if kfac is not None:
        print(kfac)  # what is preconditioned, with which dimensions
        metrics = kfac.metrics()
        print({name: round(metrics[name], 4) for name in ("grad_norm", "update_norm", "clip_factor")})
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()


for lr in (0.1, 0.2, 0.5):  # at 1.0 plain gradients diverge
    print(f"plain gradients, lr {lr}: loss {train(lr, second_order=False):.5f}")
print(f"K-FAC, lr 0.5: loss {train(0.5, second_order=True):.5f}")
