"""char-gpt: a small GPT on the characters of any text; by default Python's standard library.

Input: text files, hyperparameters. Output: data, model and session of the recipe. Owns: nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.recipe import Examples, Recipe, ScheduledSession, Session, positive_integer
from dkfac.tools.recipes.tensors import Text

LIMIT = 4_000_000
"""Most characters that are read from a folder."""
_TEXT_SUFFIXES = (".py", ".txt", ".md")


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, s, d))
        deep: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + deep


def initialise(model: nn.Module, layers: int) -> None:
    """Initialize the parameters as GPT-2 does."""
    for name, p in model.named_parameters():
        if p.ndim == 2:
            deep = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class GPT(nn.Module):
    def __init__(self, num_kinds: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_kinds, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_kinds, bias=False)
        initialise(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        found: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return found


def _check_sizes(hyper: Hyper, given: Mapping[str, Any]) -> Hyper:
    """Refuse sizes that no GPT can have."""
    _, _, heads, width = (positive_integer(hyper, name) for name in ("layers", "context", "heads", "width"))
    if width % heads:
        raise ValueError(f"--more heads={heads}: a width of {width} cannot be divided equally by them; use a divisor")
    return hyper


def _load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    """Read text files and split them into training and held-out text."""
    place = Path(path) if path is not None else Path(os.__file__).parent
    if not place.exists():
        raise ValueError(f"no text at {place}: set --data to a text file or a folder of text files")
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if _is_wanted(file, place))
    if not files:
        raise ValueError(
            f"{place} has no {', '.join(_TEXT_SUFFIXES)} files: set --data to a text file or a folder of text files"
        )
    context = int(hyper.more["context"])
    train, held = split_text([read_text(file) for file in files[:400]], context)
    if min(len(train), len(held)) <= context:
        found = f"{len(train)} characters to train on and {len(held)} to test"
        raise ValueError(
            f"{place} has {found}, but needs more than {context} of each: use more text or --more context="
        )
    kinds = sorted({c if ord(c) < 128 else "?" for c in train + held} | {"?"})
    number = {c: i for i, c in enumerate(kinds)}

    def numbers(text: str) -> Tensor:
        return torch.tensor([number.get(c, number["?"]) for c in text])

    return Text(numbers(train), context, len(kinds)), Text(numbers(held), context, len(kinds))


def _is_wanted(file: Path, folder: Path) -> bool:
    """Return whether a file has a suffix of text files and neither it nor a parent folder is hidden."""
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix in _TEXT_SUFFIXES and not is_hidden and file.is_file()


def read_text(file: Path) -> str:
    """Return the text of a file. Bytes that are not UTF-8 are skipped; a file with many of them is refused."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}): check its permissions, or remove it") from error
    text = content.decode(errors="ignore")
    if b"\0" in content or len(text.encode()) < 0.9 * len(content):
        raise ValueError(f"{file} is not text in UTF-8: unpack it if it is compressed, or convert its encoding")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_text(texts: list[str], context: int) -> tuple[str, str]:
    """Return training and held-out text. Every twentieth file is held out; with few files, the last twentieth of the
    text."""
    held = "".join(texts[19::20])
    if len(held) > context:
        return "".join(text for i, text in enumerate(texts) if i % 20 != 19)[:LIMIT], held[: LIMIT // 20]
    joined = "".join(texts)
    cut = len(joined) * 19 // 20
    return joined[:cut], joined[cut:]


def _build(examples: Examples, hyper: Hyper) -> nn.Module:
    assert isinstance(examples, Text)
    layers, width, heads = (int(hyper.more[name]) for name in ("layers", "width", "heads"))
    return GPT(examples.num_kinds, examples.context, layers, width, heads)


def _begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    return ScheduledSession(hyper, lambda x, y, generator: (x, y))


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


CHAR_GPT = Recipe(
    name="char-gpt",
    about="characters of any text (by default Python's standard library), a small GPT with AdamW",
    data="a text file or a folder of .py, .txt, .md files; by default Python's standard library",
    hyper=Hyper(
        optimizer="adamw",
        lr=3e-3,
        weight_decay=0.01,
        batch=64,
        epochs=0.2,
        warmup=0.2,
        more={"layers": 4, "width": 128, "heads": 4, "context": 128},
    ),
    kfac={"loss_terms": "token", "factor_interval": 2, "inverse_interval": 20},
    adapt=_check_sizes,
    load=_load,
    build=_build,
    begin=_begin,
    loss=_loss,
    first_order="AdamW",
    unused=("size", "label_smoothing"),
)
