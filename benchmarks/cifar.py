"""CIFAR-10, ResNet-32: test accuracy of SGD and of K-FAC at equal epochs, for the choice of defaults.

The images are read from an archive in image-folder layout (train/<class>/*.jpg, test/<class>/*.jpg). Choose settings
by the validation accuracy (5,000 training images are held out); test accuracy is reported too. Several processes share
a GPU, so times are not comparable here.
"""

import argparse
import io
import itertools
import json
import pathlib
import tarfile
import time

import torch
import torch.nn.functional as F
from environment import write
from machine import Machine
from torch import nn

import dkfac


class Block(nn.Module):
    """Two 3x3 convolutions with a parameter-free shortcut (option A of the ResNet paper)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(y + x, inplace=True)


def resnet32() -> nn.Module:
    widths = [16, *(w for w in (16, 32, 64) for _ in range(5))]
    blocks = [Block(a, b, 2 if a != b else 1) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


def read_archive(path: str) -> dict[str, torch.Tensor]:
    """Return uint8 images [N, 3, 32, 32] and labels of both splits."""
    import numpy
    from PIL import Image

    found: dict[str, list] = {"train": [], "test": []}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            if member.isfile() and len(parts) >= 3 and parts[-3] in found:
                file = archive.extractfile(member)
                assert file is not None
                found[parts[-3]].append((parts[-2], parts[-1], numpy.asarray(Image.open(io.BytesIO(file.read())))))
    classes = sorted({name for name, _, _ in found["train"]})
    data = {}
    for split, items in found.items():
        items.sort(key=lambda item: item[:2])
        data[f"{split}_x"] = torch.from_numpy(numpy.stack([image for _, _, image in items])).permute(0, 3, 1, 2)
        data[f"{split}_y"] = torch.tensor([classes.index(name) for name, _, _ in items])
    return data


def normalise(x: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=x.device).view(1, 3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=x.device).view(1, 3, 1, 1)
    return (x.float() / 255 - mean) / deviation


def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random crop after padding by 4, and random flip."""
    n = len(x)
    padded = F.pad(x, (4, 4, 4, 4))
    offsets = torch.randint(0, 9, (2, n), generator=generator, device=x.device)
    flips = torch.rand(n, generator=generator, device=x.device) < 0.5
    index = torch.arange(32, device=x.device)
    rows = (offsets[0][:, None] + index)[:, None, :, None]
    columns = torch.where(flips[:, None], 31 - index, index) + offsets[1][:, None]
    batch = torch.arange(n, device=x.device)[:, None, None, None]
    return padded[batch, torch.arange(3, device=x.device)[None, :, None, None], rows, columns[:, None, None, :]]


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    hits = sum((model(normalise(a)).argmax(1) == b).sum() for a, b in zip(x.split(1000), y.split(1000), strict=True))
    model.train()
    return float(hits) / len(y)


def begin(config: dict, data: dict[str, torch.Tensor], device: str) -> tuple:
    """Return a run's generator, the data on the device, and which pictures are held out and trained on."""
    torch.manual_seed(config["seed"])
    generator = torch.Generator(device).manual_seed(config["seed"])
    order = torch.randperm(len(data["train_y"]), generator=torch.Generator().manual_seed(0)).to(device)
    return generator, {name: t.to(device) for name, t in data.items()}, order[:5000], order[5000:]


def train(config: dict, data: dict[str, torch.Tensor], device: str) -> dict:
    generator, data, held, used = begin(config, data, device)
    model = resnet32().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, nesterov=True, weight_decay=5e-4)
    kfac = None
    if config.get("kfac") is not None:
        kfac = dkfac.KFAC(model, optimizer, settings=dkfac.Settings(announce=False, **config["kfac"]))
    batch, epochs = config["batch"], config["epochs"]
    per_epoch = len(used) // batch
    total = epochs * per_epoch
    warm = max(1, total // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))
    )
    curve = []
    start = time.perf_counter()
    for _ in range(epochs):
        shuffled = used[torch.randperm(len(used), generator=generator, device=device)]
        for chunk in shuffled.split(batch)[:per_epoch]:
            images = normalise(augment(data["train_x"][chunk], generator))
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(images), data["train_y"][chunk], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
        curve.append(accuracy(model, data["train_x"][held], data["train_y"][held]))
    return {
        "config": config,
        "validation": curve[-1],
        "test": accuracy(model, data["test_x"], data["test_y"]),
        "curve": curve,
        "seconds": time.perf_counter() - start,
        "metrics": {} if kfac is None else kfac.metrics(),
    }


def study(seeds: int) -> list[dict]:
    """The settings to compare: SGD, then K-FAC's damping, rhythm and forms at SGD's lr, most wanted first."""
    wide = {"factor_interval": 10, "inverse_interval": 100}
    dense = {"factor_interval": 2, "inverse_interval": 20}
    base = {"damping": 3e-4, **dense}
    kfac = {
        "10/100 3e-4": {"damping": 3e-4, **wide},
        "2/20 3e-4": base,
        "10/100 1e-3": {"damping": 1e-3, **wide},
        "10/100 1e-4": {"damping": 1e-4, **wide},
        "2/20 norm unit": {**base, "norm_form": "unit"},
        "10/100 relative 1e-2": {"damping": 1e-2, "damping_mode": "relative", **wide},
        "2/20 1e-3": {"damping": 1e-3, **dense},
        "2/20 1e-4": {"damping": 1e-4, **dense},
        "10/100 3e-4 no early": {"damping": 3e-4, "warmup_refresh": None, **wide},
        "2/20 ekfac": {**base, "curvature": "ekfac"},
        "2/20 cholesky": {**base, "solver": "cholesky"},
        "2/20 norm-global": {**base, "rescale": "norm-global"},
        "2/20 reduce": {**base, "weight_sharing": "reduce"},
    }
    runs: list[dict] = [{"label": "sgd 12"}, {"label": "sgd 16", "epochs": 16}]
    runs += [{"label": label, "kfac": options} for label, options in kfac.items()]
    defaults = {"epochs": 12, "lr": 0.8, "batch": 1024, "kfac": None}
    return [{**defaults, **run, "seed": seed} for seed in range(seeds) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=500, help="stop and write what there is after this long")
    parser.add_argument("--configs", help="a JSON list of runs instead of the built-in study")
    parser.add_argument("--out", default="benchmarks/results/cifar_resnet32.json")
    args = parser.parse_args()
    data = {name: t.contiguous().share_memory_() for name, t in read_archive(args.archive).items()}
    configs = study(args.seeds)
    if args.configs:
        defaults = {"epochs": 12, "lr": 0.8, "batch": 1024, "kfac": None}
        given = json.loads(args.configs)
        configs = [{**defaults, **run, "seed": seed} for seed in range(args.seeds) for run in given]
    machine = Machine(data, train, args.workers, args.seconds)
    try:
        machine.run(configs)
    finally:
        machine.close()
    write(args.out, {"finished": len(machine.runs), "asked": len(configs), "runs": machine.runs})


if __name__ == "__main__":
    main()
