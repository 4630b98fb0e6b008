"""Well-known models as lists of layers, to plan without weights or data. Batch norms and embeddings are omitted.

Input: a model's name. Output: its layers' specs, and their work. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dkfac.plan.costs import Costs
from dkfac.plan.simulate import Work
from dkfac.plan.spec import FactorSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer and its number of rows per example."""

    spec: LayerSpec
    positions: int


def linear(name: str, inputs: int, outputs: int, positions: int = 1, *, bias: bool = True) -> Shape:
    return _shape(name, "linear", inputs, outputs, positions, bias)


Kernel = tuple[int, int] | int


def conv(name: str, inputs: int, outputs: int, kernel: Kernel, side: int, *, bias: bool = False) -> Shape:
    """``side`` is the side length of the output."""
    down, across = (kernel, kernel) if isinstance(kernel, int) else kernel
    return _shape(name, "conv", inputs * down * across, outputs, side * side, bias, unit=down * across)


def _shape(name: str, kind: str, inputs: int, g_dim: int, positions: int, bias: bool, unit: int = 1) -> Shape:
    a_dim = inputs + bias
    factors = (FactorSpec("A", a_dim, unit=unit, folds_bias=bias), FactorSpec("G", g_dim))
    return Shape(LayerSpec(name, kind, factors, a_dim * g_dim), positions)


def resnet(blocks: tuple[int, ...], *, bottleneck: bool) -> Iterator[Shape]:
    yield conv("conv1", 3, 64, 7, 112)
    inputs = 64
    for stage, (count, width, side) in enumerate(zip(blocks, (64, 128, 256, 512), (56, 28, 14, 7), strict=True)):
        for block in range(count):
            name, before = f"layer{stage + 1}.{block}", side if block or not stage else 2 * side
            outputs = 4 * width if bottleneck else width
            if bottleneck:
                yield conv(f"{name}.conv1", inputs, width, 1, before)
                yield conv(f"{name}.conv2", width, width, 3, side)
                yield conv(f"{name}.conv3", width, outputs, 1, side)
            else:
                yield conv(f"{name}.conv1", inputs, width, 3, side)
                yield conv(f"{name}.conv2", width, width, 3, side)
            if block == 0 and (stage or bottleneck):
                yield conv(f"{name}.downsample.0", inputs, outputs, 1, side)
            inputs = outputs
    yield linear("fc", inputs, 1000)


def cifar_resnet(blocks: int) -> Iterator[Shape]:
    yield conv("conv1", 3, 16, 3, 32)
    inputs = 16
    for stage, (width, side) in enumerate(((16, 32), (32, 16), (64, 8))):
        for block in range(blocks):
            yield conv(f"stage{stage + 1}.{block}.conv1", inputs, width, 3, side)
            yield conv(f"stage{stage + 1}.{block}.conv2", width, width, 3, side)
            inputs = width
    yield linear("fc", inputs, 10)


def vgg16() -> Iterator[Shape]:
    inputs, number = 3, 0
    for width, count, side in ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)):
        for _ in range(count):
            yield conv(f"features.{number}", inputs, width, 3, side, bias=True)
            inputs, number = width, number + 1
    for i, (a, b) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000))):
        yield linear(f"classifier.{i}", a, b)


def densenet(blocks: tuple[int, ...], growth: int = 32) -> Iterator[Shape]:
    yield conv("conv0", 3, 64, 7, 112)
    inputs, side = 64, 56
    for i, count in enumerate(blocks):
        for layer in range(count):
            yield conv(f"denseblock{i + 1}.{layer}.conv1", inputs, 4 * growth, 1, side)
            yield conv(f"denseblock{i + 1}.{layer}.conv2", 4 * growth, growth, 3, side)
            inputs += growth
        if i + 1 < len(blocks):
            yield conv(f"transition{i + 1}", inputs, inputs // 2, 1, side)
            inputs, side = inputs // 2, side // 2
    yield linear("classifier", inputs, 1000)


Chain = tuple[int, tuple[tuple[int, Kernel, int], ...]]
"""Consecutive convolutions: the input channels, then output channels, kernel and output side of each."""


def _chains(name: str, chains: Iterable[Chain]) -> Iterator[Shape]:
    for i, (inputs, links) in enumerate(chains):
        for j, (outputs, kernel, side) in enumerate(links):
            yield conv(f"{name}.{i}.{j}", inputs, outputs, kernel, side)
            inputs = outputs


def inception_v4() -> Iterator[Shape]:
    wide, tall = (1, 7), (7, 1)
    yield from _chains("stem", [
        (3, ((32, 3, 149), (32, 3, 147), (64, 3, 147))), (64, ((96, 3, 73),)), (160, ((64, 1, 73), (96, 3, 71))),
        (160, ((64, 1, 73), (64, wide, 73), (64, tall, 73), (96, 3, 71))), (192, ((192, 3, 35),)),
    ])  # fmt: skip
    for block in range(4):
        yield from _chains(f"a{block}", [
            (384, ((96, 1, 35),)), (384, ((64, 1, 35), (96, 3, 35))),
            (384, ((64, 1, 35), (96, 3, 35), (96, 3, 35))), (384, ((96, 1, 35),)),
        ])  # fmt: skip
    yield from _chains("reduction_a", [(384, ((384, 3, 17),)), (384, ((192, 1, 35), (224, 3, 35), (256, 3, 17)))])
    for block in range(7):
        yield from _chains(f"b{block}", [
            (1024, ((384, 1, 17),)), (1024, ((192, 1, 17), (224, wide, 17), (256, tall, 17))),
            (1024, ((192, 1, 17), (192, tall, 17), (224, wide, 17), (224, tall, 17), (256, wide, 17))),
            (1024, ((128, 1, 17),)),
        ])  # fmt: skip
    yield from _chains("reduction_b", [
        (1024, ((192, 1, 17), (192, 3, 8))), (1024, ((256, 1, 17), (256, wide, 17), (320, tall, 17), (320, 3, 8))),
    ])  # fmt: skip
    for block in range(3):
        yield from _chains(f"c{block}", [
            (1536, ((256, 1, 8),)), (1536, ((384, 1, 8),)), (384, ((256, (1, 3), 8),)), (384, ((256, (3, 1), 8),)),
            (1536, ((384, 1, 8), (448, (3, 1), 8), (512, (1, 3), 8))), (512, ((256, (1, 3), 8),)),
            (512, ((256, (3, 1), 8),)), (1536, ((256, 1, 8),)),
        ])  # fmt: skip
    yield linear("last_linear", 1536, 1000)


def transformer(layers: int, width: int, tokens: int, *, fused: bool) -> Iterator[Shape]:
    for i in range(layers):
        if fused:
            yield linear(f"{i}.attn.qkv", width, 3 * width, tokens)
        else:
            for name in "qkv":
                yield linear(f"{i}.attn.{name}", width, width, tokens)
        yield linear(f"{i}.attn.out", width, width, tokens)
        yield linear(f"{i}.mlp.up", width, 4 * width, tokens)
        yield linear(f"{i}.mlp.down", 4 * width, width, tokens)


def bert_large() -> Iterator[Shape]:
    yield from transformer(24, 1024, 384, fused=False)
    yield linear("pooler", 1024, 1024)


def vit_b() -> Iterator[Shape]:
    yield conv("patches", 3, 768, 16, 14, bias=True)
    yield from transformer(12, 768, 197, fused=False)
    yield linear("head", 768, 1000)


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet18": lambda: resnet((2, 2, 2, 2), bottleneck=False),
    "resnet32": lambda: cifar_resnet(5),
    "resnet34": lambda: resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: resnet((3, 4, 23, 3), bottleneck=True),
    "resnet152": lambda: resnet((3, 8, 36, 3), bottleneck=True),
    "vgg16": vgg16,
    "densenet121": lambda: densenet((6, 12, 24, 16)),
    "densenet201": lambda: densenet((6, 12, 48, 32)),
    "inception-v4": inception_v4,
    "bert-large": bert_large,
    "gpt2": lambda: transformer(12, 768, 1024, fused=True),
    "vit-b": vit_b,
}


def work_of(shapes: Iterable[Shape], examples: int, costs: Costs) -> Work:
    """Return the work of a rank with ``examples`` examples, from the costs of dense matrix products."""
    forward, backward, factors = dict[str, float](), dict[str, float](), dict[tuple[str, str], float]()
    for shape in shapes:
        spec, rows = shape.spec, examples * shape.positions
        flops = 2.0 * rows * spec.grad_elements
        forward[spec.name], backward[spec.name] = costs.work("products", flops), 2 * costs.work("products", flops)
        for factor in spec.factors:
            columns = factor.dim if factor.form == "dense" else 1
            seconds = costs.work("factor", 2.0 * rows * factor.dim * columns * factor.num_blocks)
            factors[spec.name, factor.key] = seconds
    return Work(forward, backward, factors)


def scaled(shapes: Iterable[Shape], passes: float, measuring: float) -> Work:
    """Return work proportional to operation counts whose sums are the given seconds of both passes and of measuring."""
    unit = work_of(shapes, 1, Costs(flop_seconds=1.0))
    known = passes / (sum(unit.forward.values()) + sum(unit.backward.values()))
    each = measuring / sum(unit.factors.values())
    return Work(
        {name: known * value for name, value in unit.forward.items()},
        {name: known * value for name, value in unit.backward.items()},
        {key: each * value for key, value in unit.factors.items()},
    )
