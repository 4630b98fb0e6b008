"""The tasks of ``tuned_rates.py``: models, data, former defaults, learning rates, and how a run is trained."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import char_gpt
import cifar_vit
import torch
import torch.nn.functional as F
from char_gpt import Characters
from cifar import augment, normalise
from cifar_vit import Images
from torch import Tensor, nn
from transformer_study import WARMUP, Task

import dkfac
from dkfac.tools.recipes.resnet import build_cifar_resnet, build_resnet

RESOLVED = (
    "curvature", "solver", "block_dim", "damping", "rescale", "factor_interval", "inverse_interval", "warmup_refresh",
    "factor_decay", "tf32", "cuda_graph",
)  # fmt: skip
"""Settings kept with each run, as K-FAC chose them."""


class ResNet(Images):
    """Images in epochs and with label smoothing, as in ``cifar_optimizers.py``."""

    chunks: Iterator[Tensor] = iter(())

    def model(self) -> nn.Module:
        tiny = self.size["depth"] < 18
        model = build_cifar_resnet(self.size["depth"]) if tiny else build_resnet(18, 10, small_images=True)
        return model.to(memory_format=torch.channels_last)

    def batch(self, generator: torch.Generator, *, held: bool = False) -> tuple[Tensor, Tensor]:
        chunk, size, used = next(self.chunks, None), self.size["batch"], self.places[0]
        if chunk is None:
            order = torch.randperm(len(used), generator=generator, device=self.device)
            self.chunks = iter(used[order[: len(used) // size * size]].split(size))
            chunk = next(self.chunks)
        return normalise(augment(self.x[chunk], generator)), self.y[chunk]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return F.cross_entropy(model(x), y, label_smoothing=0.1)


@dataclass(frozen=True)
class Case:
    make: type[Task]
    size: dict
    tiny: dict
    rates: tuple[float, ...]
    former: dict
    options: dict = field(default_factory=dict)  # of K-FAC in both of its arms


ADAM_EIGEN = {"curvature": "adam-eigen", "block_dim": None, "statistics_fraction": 1.0}
INVERSES = {"curvature": "kfac", "solver": "cholesky", "block_dim": None, "statistics_fraction": 1.0}
CASES = {  # the longest runs first
    "gpt": Case(
        Characters, char_gpt.SIZES["small"] | {"steps": 500}, char_gpt.SIZES["tiny"] | {"steps": 12},
        (5e-4, 1.2e-3, 3e-3, 7e-3, 1.7e-2), ADAM_EIGEN, {"loss_terms": "token"},
    ),
    "resnet18": Case(
        ResNet, {"depth": 18, "batch": 1024, "steps": 344}, {"depth": 8, "batch": 32, "steps": 12},
        (0.08, 0.2, 0.5, 1.25, 3.2), INVERSES,
    ),
    "vit": Case(
        Images, cifar_vit.SIZES["small"] | {"steps": 500}, cifar_vit.SIZES["tiny"] | {"steps": 12},
        (3e-4, 7e-4, 1.7e-3, 4e-3, 1e-2), ADAM_EIGEN,
    ),
}  # fmt: skip


def share_of_rate(name: str, step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up and decay, as the other studies of each task have them."""
    warm = max(1, round(steps * WARMUP))
    if name == "resnet18":
        return (step + 1) / warm if step < warm else (steps - step) / (steps - warm)
    return min(1.0, (step + 1) / warm) * (1 - step / steps)


@torch.no_grad()
def examine(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the loss and the share of wrong predictions on held-out data, which are always the same."""
    model.eval()
    if isinstance(task, Images):
        batches = [(normalise(task.x[part]), task.y[part]) for part in task.places[1].split(1000)]
    else:
        generator = torch.Generator(task.device).manual_seed(12345)
        batches = [task.batch(generator, held=True) for _ in range(20)]
    loss, wrong, count = torch.zeros((), device=task.device), torch.zeros((), device=task.device), 0
    for x, y in batches:
        with torch.autocast(task.device, torch.bfloat16, enabled=task.device == "cuda"):
            output = model(x).flatten(0, -2).float()
        loss += F.cross_entropy(output, y.flatten(), reduction="sum")
        wrong += (output.argmax(1) != y.flatten()).sum()
        count += y.numel()
    model.train()
    found = float(loss) / count
    return {"loss": found if math.isfinite(found) else math.inf, "error_rate": float(wrong) / count}


def train(config: dict, data: dict, device: str) -> dict:
    begin, name, size, lr = time.perf_counter(), config["task"], config["size"], config["lr"]
    case, steps = CASES[name], size["steps"]
    task = case.make(data["images" if issubclass(case.make, Images) else "text"], size, device)
    torch.manual_seed(config["seed"])
    generator = torch.Generator(device).manual_seed(config["seed"])
    model, kfac, curve = task.model().to(device), None, []
    if name == "resnet18":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    if config["options"] is not None:
        kfac = dkfac.KFAC(model, optimizer, announce=False, **config["options"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(name, step, steps))
    for step in range(1, steps + 1):
        x, y = task.batch(generator)
        optimizer.zero_grad()
        task.loss(model, x, y).backward()
        optimizer.step()
        schedule.step()
        if 4 * step // steps > 4 * (step - 1) // steps:  # after each quarter
            curve.append({"step": step} | examine(task, model))
            if math.isinf(curve[-1]["loss"]):
                break
    last, seconds = curve[-1], round(time.perf_counter() - begin, 2)
    run = {"config": config, "loss": last["loss"], "error_rate": last["error_rate"], "seconds": seconds, "curve": curve}
    if kfac is not None:
        run["settings"] = {n: v for n, v in kfac.settings.describe().items() if n in RESOLVED}
        kfac.close()
    return run
