"""Count the host operations of a step that K-FAC does not measure: torch's own, and calls of Python functions.

``PYTHONPATH=CHECKOUT python benchmarks/unmeasured_step.py --out FILE`` counts another revision's.
"""

import argparse
import sys

import torch
from environment import write
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dkfac

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
}


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def models():
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(16, 16), nn.ReLU())]
    yield "6 Linear", nn.Sequential(*layers), torch.randn(8, 16)
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    yield "convolutions", nn.Sequential(*parts, nn.Linear(128, 4)), torch.randn(8, 3, 8, 8)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    yield "encoder", nn.TransformerEncoder(layer, 2), torch.randn(8, 5, 16)


def count(model, optimizer, x, **options):
    """Return the figures of the third step after one that measures."""
    options |= {"announce": False, "factor_interval": 10, "inverse_interval": 10, "warmup_refresh": None}
    kfac = dkfac.KFAC(model, optimizer, **options)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(13):
        step()
    with Count() as counted:
        step()
    calls = 0

    def called(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(called)
    step()
    sys.setprofile(None)
    return {"layers": len(kfac.factors()), "dispatched": counted.number, "python_calls": calls}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/unmeasured_step_cpu.json")
    parser.add_argument("--curvature", default="kfac")
    given = parser.parse_args()
    found = {}
    for kind, make in OPTIMIZERS.items():
        for name, model, x in models():
            found[f"{name}, {kind}"] = count(model, make(model.parameters()), x, curvature=given.curvature)
            print(f"{name}, {kind}: {found[f'{name}, {kind}']}")
    write(given.out, {"curvature": given.curvature, "cases": found})


if __name__ == "__main__":
    main()
