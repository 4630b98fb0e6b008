"""A Linear layer on a flattened feature map, with one input factor and with two (channels, positions; ``flattened``).

Compares the memory of K-FAC's state and the time of its stages on one CPU core, and the update directions after some
training of a small CNN on the digits. VGG-16's first Linear layer is measured only with two input factors: a single
one would have 25,089 rows.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from environment import write
from torch import nn

import dkfac
from dkfac.tools.recipes import digits


def measured(channels: int, positions: int, out: int, flattened: bool, batch: int = 32) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(channels * positions, out))
    x, y = torch.randn(batch, channels * positions), torch.randint(out, (batch,))
    maps = {"experimental": {"flattened": {"0": channels}}} if flattened else {"flattened": "off"}
    options = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": 1, "announce": False, "max_dim": 10**6}
    with dkfac.KFAC(model, **maps, **options) as kfac:
        begin = time.perf_counter()
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kfac.step()
        seconds = (time.perf_counter() - begin) / 2
        factors = kfac.factors()["0"]
        report = kfac.report()
    sizes = {key: list(factor.shape) for key, factor in factors.items()}
    inputs = sum(4 * factor.numel() for key, factor in factors.items() if key != "G")
    stages = {name: value / 2 for name, value in report["stage_seconds"].items()}
    print(f"{channels} x {positions} -> {out}, {'two' if flattened else 'one'}: {sizes}, A {inputs / 1e6:.2f} MB, all "
          f"{report['total_memory_bytes'] / 1e6:.0f} MB, step {seconds:.3f} s, "
          + ", ".join(f"{name} {value:.3f}" for name, value in stages.items()), flush=True)  # fmt: skip
    return {"sizes": sizes, "input_factor_bytes": inputs, "state_bytes": report["total_memory_bytes"],
            "step_seconds": seconds, "stage_seconds": stages}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def directions() -> dict:
    """Return how the two directions of the last layer compare, on the same batches of a network that has trained."""
    data, found = digits.load_digit_images("validation"), {}
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in digits.batches(data, digits.DigitsConfig(epochs=2)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    batches = list(digits.batches(data, digits.DigitsConfig(epochs=1, seed=5)))
    grads = {}
    for name, maps in (("one", {"flattened": "off"}), ("two", {"experimental": {"flattened": {"6": 32}}})):
        options = {"warmup_refresh": None, "factor_interval": 1, "inverse_interval": len(batches), "rescale": "none"}
        with dkfac.KFAC(model, **maps, announce=False, damping=1e-3, **options) as kfac:
            for step in range(len(batches) + 1):
                x, y = batches[step % len(batches)]
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                raw = model[6].weight.grad.clone()
                kfac.step()
            grads[name] = model[6].weight.grad.clone()
    flat = {name: g.flatten() for name, g in grads.items()} | {"raw": raw.flatten()}
    for a, b in (("one", "two"), ("one", "raw"), ("two", "raw")):
        found[f"{a}, {b}"] = float(F.cosine_similarity(flat[a], flat[b], dim=0))
        print(f"cosine of {a} and {b}: {found[f'{a}, {b}']:.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/flattened_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    body = {
        "64 x 49 -> 256": {name: measured(64, 49, 256, name == "two") for name in ("one", "two")},
        "VGG-16, 512 x 49 -> 4096": {"two": measured(512, 49, 4096, True, 8), "one, bytes of A": 4 * 25089**2},
        "cosines": directions(),
    }
    write(given.out, body)


if __name__ == "__main__":
    main()
