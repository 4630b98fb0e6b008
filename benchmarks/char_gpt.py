"""How fast does a small GPT learn characters? See ``transformer_study.py``.

Text: the sources of Python's standard library; every twentieth file is held out.
"""

import argparse
import os
import pathlib
import sys

import torch
from torch import Tensor, nn
from transformer_study import Task, add_arguments, study

from dkfac.tools.recipes.char_gpt import GPT

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 16, "steps": 500},
    "small": {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "steps": 2000},
    "medium": {"layers": 8, "width": 512, "heads": 8, "context": 256, "batch": 64, "steps": 2000},
}


class Characters(Task):
    terms = "token"

    def __init__(self, data: tuple[Tensor, Tensor, int], size: dict, device: str) -> None:
        super().__init__(data, size, device)
        self.texts = [text.to(device) for text in data[:2]]

    def model(self) -> nn.Module:
        return GPT(self.data[2], *(self.size[name] for name in ("context", "layers", "width", "heads")))

    def batch(self, generator: torch.Generator, *, held: bool = False) -> tuple[Tensor, Tensor]:
        text, context = self.texts[held], self.size["context"]
        starts = torch.randint(
            len(text) - context - 1, (self.size["batch"], 1), generator=generator, device=self.device
        )
        rows = text[starts + torch.arange(context + 1, device=self.device)]
        return rows[:, :-1], rows[:, 1:]


def read_text(limit: int) -> tuple[Tensor, Tensor, int]:
    """Return characters to train on and to validate on, as numbers, and how many kinds there are."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py")) + sorted(
        path for folder in ("asyncio", "email", "json", "unittest", "xml", "http", "logging", "importlib")
        for path in (pathlib.Path(os.__file__).parent / folder).rglob("*.py")
    )  # fmt: skip
    parts: tuple[list[str], list[str]] = ([], [])
    for i, path in enumerate(files):
        text = path.read_text(errors="ignore").encode("ascii", "ignore").decode()
        parts[i % 20 == 19].append(text)
    train, held = ("".join(part)[:limit] for part in parts)
    kinds = sorted(set(train + held))
    number = {c: i for i, c in enumerate(kinds)}
    return torch.tensor([number[c] for c in train]), torch.tensor([number[c] for c in held]), len(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, SIZES)
    parser.add_argument("--text", type=int, default=4_000_000, help="characters")
    args = parser.parse_args()
    study(args, Characters, SIZES, read_text(args.text), "char_gpt")


if __name__ == "__main__":
    sys.exit(main())
