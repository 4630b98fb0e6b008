"""Curvature of norm layers: none (left to the optimizer), diagonal, 2x2 per channel, one matrix for all channels.

Memory: bytes of factors and decompositions of the norm layers of a ResNet-50, from their shapes. Time: a step of a
CIFAR ResNet-20 on one core, with alternating forms, measuring and decomposing at each step. Effect: the digits for 5
epochs, evaluated on the validation images, at the default learning rate and at three times it.
"""

import argparse
import dataclasses
import statistics
import time

import torch
import torch.nn.functional as F
from environment import write

import dkfac
from dkfac.config.settings import Settings
from dkfac.layers.find import find_layers
from dkfac.tools.recipes import digits
from dkfac.tools.recipes.resnet import build_cifar_resnet, build_resnet

FORMS = ("off", "diagonal", "unit", "full")
OPTIONS = {"announce": False, "damping": 1e-3}


def of_form(form: str) -> dict:
    """Return the options that choose a form: those of all channels together are experimental."""
    return {"experimental": {"norm_form": form}} if form in ("diagonal", "full") else {"norm_form": form}


def memory() -> dict:
    found = {}
    with torch.device("meta"):
        model = build_resnet(50)
    for form in FORMS:
        layers, _ = find_layers(model, Settings(**of_form(form)), None, meta=True)
        norms = [layer for layer in layers if layer.is_norm]
        found[form] = {"layers": len(norms), "bytes": 4 * sum(layer.spec.state_elements for layer in norms)}
        print(f"ResNet-50 {form}: {len(norms)} norm layers, {found[form]['bytes'] / 1e6:.2f} MB")
    return found


def times(rounds: int, batch: int) -> dict:
    """Return milliseconds of a step, the median of rounds in which forms take turns."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    runs = {}
    for form in ("sgd", *FORMS):
        model = build_cifar_resnet(20)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if form != "sgd":
            rhythm = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None, "solver": "cholesky"}
            dkfac.KFAC(model, optimizer, **of_form(form), **OPTIONS, **rhythm)
        runs[form] = model, optimizer
    found: dict[str, list[float]] = {form: [] for form in runs}
    for _ in range(rounds + 1):
        for form, (model, optimizer) in runs.items():
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            found[form].append(1e3 * (time.perf_counter() - begin))
    result = {form: statistics.median(values[1:]) for form, values in found.items()}
    print("ms a step: " + ", ".join(f"{form} {value:.0f}" for form, value in result.items()))
    return result


def effect(seeds: int) -> dict:
    data, found = digits.load_digit_images("validation"), {}
    for lr in (digits.DigitsConfig().lr, 3 * digits.DigitsConfig().lr):
        for form in FORMS:
            runs = [
                digits.train_digits(data, digits.DigitsConfig(seed=seed, epochs=5, lr=lr), of_form(form) | OPTIONS)[-1]
                for seed in range(seeds)
            ]
            found[f"{form} lr {lr:g}"] = [dataclasses.asdict(run) for run in runs]
            losses, accuracies = [run.held_out_loss for run in runs], [run.accuracy for run in runs]
            print(
                f"digits {form} lr {lr:g}: held-out loss {statistics.median(losses):.4f} ({min(losses):.4f} to "
                f"{max(losses):.4f}), accuracy {statistics.median(accuracies):.2%}, training loss "
                f"{statistics.median(run.train_loss for run in runs):.4f}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", default="benchmarks/results/norm_forms_cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    body = {"resnet50_bytes": memory(), "step_ms": times(given.rounds, given.batch), "digits": effect(given.seeds)}
    write(given.out, body)


if __name__ == "__main__":
    main()
