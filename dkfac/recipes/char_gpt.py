"""char-gpt: a small GPT on characters of any text; by default Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dkfac
from dkfac.recipes.recipe import Examples, Hyper, Plain, Recipe, Session
from dkfac.recipes.tensors import Text

LIMIT = 4_000_000
"""Characters."""


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


class GPT(nn.Module):
    def __init__(self, num_kinds: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_kinds, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_kinds, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        found: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return found


def load(path: str | None, hyper: Hyper) -> tuple[Examples, Examples]:
    """Read text files; every twentieth is held out, or of one file the last twentieth."""
    place = Path(path) if path is not None else Path(os.__file__).parent
    if not place.exists():
        raise ValueError(f"no text at {place}: give --data a text file or a folder of them")
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix in (".py", ".txt", ".md"))
    texts = [file.read_text(errors="ignore") for file in files[:400]]
    if len(texts) == 1:
        cut = len(texts[0]) * 19 // 20
        train, held = texts[0][:cut], texts[0][cut:]
    else:
        train = "".join(t for i, t in enumerate(texts) if i % 20 != 19)[:LIMIT]
        held = "".join(t for i, t in enumerate(texts) if i % 20 == 19)[: LIMIT // 20]
    context = int(hyper.more["context"])
    if min(len(train), len(held)) <= context:
        raise ValueError(
            f"{place} has {len(train)} characters to train on, {len(held)} to test: more than {context} each"
        )
    kinds = sorted({c if ord(c) < 128 else "?" for c in train + held} | {"?"})
    number = {c: i for i, c in enumerate(kinds)}

    def numbers(text: str) -> Tensor:
        return torch.tensor([number.get(c, number["?"]) for c in text])

    return Text(numbers(train), context, len(kinds)), Text(numbers(held), context, len(kinds))


def build(examples: Examples, hyper: Hyper) -> nn.Module:
    assert isinstance(examples, Text)
    layers, width, heads = (int(hyper.more[name]) for name in ("layers", "width", "heads"))
    return GPT(examples.num_kinds, examples.context, layers, width, heads)


def begin(model: nn.Module, examples: Examples, hyper: Hyper, place: dkfac.distributed.Place) -> Session:
    return Plain(hyper, lambda x, y, generator: (x, y))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


RECIPE = Recipe(
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
    load=load,
    build=build,
    begin=begin,
    loss=loss,
    first_order="AdamW",
)
