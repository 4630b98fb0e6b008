"""How fast does a small vision transformer learn CIFAR-10? See ``transformer_study.py``.

The images are read from an archive in image-folder layout, as in ``cifar.py``; the reported loss is that of 5,000
held-out training images. With ``none`` for the archive, the script runs on random images as a smoke test.
"""

import argparse
import sys

import torch
from cifar import augment, normalise, read_archive
from torch import Tensor, nn
from transformer_study import Task, add_arguments, study

from dkfac.tools.recipes.char_gpt import Block, initialise

SIZES = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "patch": 8, "batch": 32, "steps": 60},
    "small": {"layers": 6, "width": 256, "heads": 4, "patch": 4, "batch": 256, "steps": 1000},
}


class ViT(nn.Module):
    def __init__(self, size: dict) -> None:
        super().__init__()
        width, patch = size["width"], size["patch"]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn((32 // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, size["heads"], causal=False) for _ in range(size["layers"])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        initialise(self, size["layers"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class Images(Task):
    def __init__(self, data: dict[str, Tensor], size: dict, device: str) -> None:
        super().__init__(data, size, device)
        order = torch.randperm(len(data["train_y"]), generator=torch.Generator().manual_seed(0))
        self.places = [order[len(order) // 10 :].to(device), order[: len(order) // 10].to(device)]
        self.x, self.y = data["train_x"].to(device), data["train_y"].to(device)

    def model(self) -> nn.Module:
        return ViT(self.size)

    def batch(self, generator: torch.Generator, *, held: bool = False) -> tuple[Tensor, Tensor]:
        places = self.places[held]
        index = torch.randint(len(places), (self.size["batch"],), generator=generator, device=self.device)
        x, y = self.x[places[index]], self.y[places[index]]
        return normalise(x if held else augment(x, generator)), y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive")
    add_arguments(parser, SIZES)
    args = parser.parse_args()
    if args.archive == "none":
        x, y = torch.randint(256, (400, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (400,))
        data = {"train_x": x, "train_y": y}
    else:
        data = {name: t for name, t in read_archive(args.archive).items() if name.startswith("train")}
    study(args, Images, SIZES, data, "cifar_vit")


if __name__ == "__main__":
    sys.exit(main())
