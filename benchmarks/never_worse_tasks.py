"""Tasks of ``never_worse.py``: small models in the style of public training scripts, on data that needs no download.

Images are scikit-learn's digits, text is Python's standard library, the log of the actor-critic is synthetic; training
and held-out examples are disjoint. ``WordTransformer`` and ``super_resolution`` are smaller versions of PyTorch's
examples.
"""

import os
import re
from collections import Counter
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dkfac.tools.recipes.char_gpt import GPT, Block, read_text
from dkfac.tools.recipes.resnet import BasicBlock

LIBRARY = Path(os.__file__).parent
MODULES = ("argparse", "inspect", "tarfile", "turtle")
NUM_CHARACTERS, CONTEXT, NUM_WORDS, SENTENCE = 96, 64, 1000, 35
Examples = tuple[Tensor, Tensor]
Data = tuple[Examples, Examples]  # what is trained on, and what is held out


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def digits(size: int = 8) -> Data:
    """Return images between 0 and 1, ``size`` pixels wide and high, and their labels; a fifth is held out."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = F.interpolate(pixels.float().view(-1, 1, 8, 8) / 16, size=size, mode="bilinear")
    held, train = torch.randperm(len(images), generator=seeded(0)).tensor_split([len(images) // 5])
    return (images[train], labels[train]), (images[held], labels[held])


@cache
def moved_digits() -> Data:
    """Return digits at random places of 10 x 10 pixels, with noise, as if normalised by mean and deviation."""

    def move(images: Tensor, labels: Tensor, number: int, generator: torch.Generator) -> Examples:
        chosen = torch.randint(len(images), (number,), generator=generator)
        top, left = torch.randint(3, (2, number, 1), generator=generator) + torch.arange(10)
        moved = F.pad(images, (2, 2, 2, 2))[chosen[:, None, None], 0, top[:, :, None], left[:, None, :]]
        return ((moved + 0.2 * torch.randn(moved.shape, generator=generator) - 0.2) / 0.4)[:, None], labels[chosen]

    train, held = digits()
    return move(*train, 8192, seeded(1)), move(*held, 512, seeded(2))


@cache
def mosaics(*, halved: bool) -> Data:
    """Return images of four digits, halved or with noise, and as they were: 16 x 16 pixels."""

    def assemble(images: Tensor, number: int, generator: torch.Generator) -> Examples:
        four = images[torch.randint(len(images), (number, 4), generator=generator), 0].view(-1, 2, 2, 8, 8)
        sharp = four.transpose(2, 3).reshape(-1, 1, 16, 16)
        noise = torch.randn(sharp.shape, generator=generator)
        return F.avg_pool2d(sharp, 2) if halved else sharp + 0.3 * noise, sharp

    (train, _), (held, _) = digits()
    return assemble(train, 4096, seeded(3)), assemble(held, 256, seeded(4))


@cache
def text(pattern: str, length: int, kinds: int) -> Data:
    """Return windows of what ``pattern`` finds in the standard library, numbered by frequency, and what follows."""
    texts = [read_text(file) for file in sorted(LIBRARY.glob("*.py"))]
    held = re.findall(pattern, "".join(texts[9::10])[:200_000])  # every tenth module
    train = re.findall(pattern, "".join(text for i, text in enumerate(texts) if i % 10 != 9)[:1_000_000])
    number = {symbol: i for i, (symbol, _) in enumerate(Counter(train).most_common(kinds - 1), start=1)}

    def windows(symbols: list[str]) -> Examples:
        found = torch.tensor([number.get(symbol, 0) for symbol in symbols]).unfold(0, length + 1, length)
        return found[:, :-1], found[:, 1:]

    x, y = windows(held)
    return windows(train), (x[::12], y[::12])


characters = partial(text, r"(?s).", CONTEXT, NUM_CHARACTERS)
words = partial(text, r"\w+|[^\w\s]|\n", SENTENCE, NUM_WORDS)


@cache
def origins() -> Data:
    """Return windows of 40 characters and which module each is from; every twentieth is held out."""
    texts = [read_text(LIBRARY / f"{name}.py")[:90_000] for name in MODULES]
    windows = [torch.tensor([min(ord(c), 127) for c in text]).unfold(0, 40, 40) for text in texts]
    x, y = torch.cat(windows), torch.cat([torch.full((len(w),), i) for i, w in enumerate(windows)])
    is_held = torch.arange(len(y)) % 20 == 19
    return (x[~is_held], y[~is_held]), (x[is_held], y[is_held])


@cache
def logged_steps() -> Data:
    """Return observations and, of each step, the action that was taken, the return and the action's weight."""
    generator = seeded(6)
    inner, policy, value = (torch.randn(shape, generator=generator) / 4 for shape in ((16, 32), (32, 4), (32, 1)))

    def log(number: int) -> Examples:
        x = torch.randn(number, 16, generator=generator)
        hidden = torch.tanh(2 * x @ inner)
        action = torch.multinomial(torch.softmax(8 * hidden @ policy, 1), 1, generator=generator)
        advantage = 0.5 * torch.randn(number, 1, generator=generator)
        return x, torch.cat([action, hidden @ value + advantage, advantage.exp()], 1)

    return log(16384), log(1024)


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers = ((nn.Linear(i, o), activation()) for i, o in pairwise(widths))
    return nn.Sequential(nn.Flatten(), *chain(*layers))[:-1]


def autoencoder() -> nn.Sequential:
    model = mlp(196, 128, 64, 32, 16, 32, 64, 128, 196)
    for layer in model[1::2]:
        nn.init.xavier_uniform_(layer.weight)
    return model


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.logvar = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.flatten(1)))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.fc4(F.relu(self.fc3(z))), mean, logvar


def gpt(*, tied: bool) -> GPT:
    model = GPT(NUM_CHARACTERS, CONTEXT, layers=2, width=64, heads=4)
    if tied:
        model.head.weight = model.tokens.weight
    return model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self.rotate(q), self.rotate(k)) if self.rotary else (q, k)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(a.shape[-1]) / a.shape[-1])
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class EncoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.dropout = Attention(width, 2, bias=True, rotary=False), nn.Dropout(0.2)
        self.linear1, self.linear2 = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class WordTransformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(NUM_WORDS, width), nn.Linear(width, NUM_WORDS)
        self.layers = nn.Sequential(nn.Dropout(0.2), EncoderLayer(width), EncoderLayer(width))
        angles = torch.arange(SENTENCE)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.layers(self.encoder(x) * self.encoder.embedding_dim**0.5 + self.places))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, 4, bias=False, rotary=True)
        sizes = (width, hidden), (width, hidden), (hidden, width)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in sizes)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def llama() -> nn.Sequential:
    last = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, NUM_CHARACTERS, bias=False)
    model = nn.Sequential(nn.Embedding(NUM_CHARACTERS, 64), LlamaLayer(64, 176), LlamaLayer(64, 176), *last)
    for weight in (p for p in model.parameters() if p.ndim == 2):
        nn.init.normal_(weight, std=0.02)
    return model


class ViT(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, width, 7, 7), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(Block(width, 4, causal=False), Block(width, 4, causal=False))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).mT + self.places)).mean(1))


def cnn() -> nn.Sequential:
    stages = [(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for i, o in ((1, 16), (16, 32))]
    return nn.Sequential(*chain(*stages), *mlp(128, 64, 10, activation=nn.ReLU))


def resnet() -> nn.Sequential:
    stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def super_resolution() -> nn.Sequential:
    convs = [nn.Conv2d(i, o, k, padding=k // 2) for i, o, k in ((1, 32, 5), (32, 32, 3), (32, 16, 3), (16, 4, 3))]
    return nn.Sequential(*chain(*((conv, nn.ReLU()) for conv in convs[:-1])), convs[-1], nn.PixelShuffle(2))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(128, 32), nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(MODULES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0].mean(1))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = mlp(16, 64, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.policy(hidden), self.value(hidden)


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        channels = ((1, width), (width, 2 * width), (2 * width, 2 * width), (4 * width, width), (2 * width, width))
        stages = [(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU()) for i, o in channels]
        self.down1, self.down2, self.middle, self.up2, self.up1 = (nn.Sequential(*stage) for stage in stages)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        middle = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2)
        middle = F.interpolate(self.up2(torch.cat([middle, second], 1)), scale_factor=2)
        return self.out(self.up1(torch.cat([middle, first], 1)))


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def reconstruct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x), x.flatten(1))


def evidence(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output, mean, logvar = model(x)
    pixels = F.binary_cross_entropy_with_logits(output, x.flatten(1), reduction="sum")
    return (pixels - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()) / len(x)


def act_and_judge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the actor-critic's loss: weighted actions, half the returns' squared error, less an entropy bonus."""
    (logits, value), (action, found, weight) = model(x), y.unbind(1)
    policy = (weight * F.cross_entropy(logits, action.long(), reduction="none")).mean()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    return policy + 0.5 * F.mse_loss(value.squeeze(1), found) - 0.01 * entropy
