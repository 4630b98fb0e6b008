"""Layers as the planner sees them: written out, and generated."""

from hypothesis import strategies as st

from dkfac.plan.spec import FactorSpec, LayerSpec


def linear(name, out, inputs, blocks=1, form="dense", dtype="float32"):
    factors = (FactorSpec("A", inputs, blocks, form), FactorSpec("G", out, blocks))
    return LayerSpec(name, "linear", factors, blocks * out * inputs, dtype)


def norm(name, channels):
    return LayerSpec(name, "norm-unit", (FactorSpec("F", 2, channels),), 2 * channels)


def resnet50():
    """torchvision's ResNet-50, as (out, inputs of a patch): convolutions without bias, fc with."""
    sizes, inputs = [(64, 3 * 49)], 64
    for width, blocks in zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            sizes += [(width, inputs), (width, width * 9), (4 * width, width)]
            sizes += [(4 * width, inputs)] if block == 0 else []
            inputs = 4 * width
    sizes.append((1000, 2048 + 1))
    return [linear(f"{i}", *size) for i, size in enumerate(sizes)]


LISTS = {
    "none": [],
    "one": [linear("a", 3, 4)],
    "equal": [linear(f"{i}", 16, 16) for i in range(11)],
    "mixed": [linear("conv", 8, 27, blocks=2), linear("tokens", 64, 5000, form="diagonal"), norm("n", 64),
              linear("wide", 10, 900), linear("double", 40, 41, dtype="float64"), linear("tiny", 1, 1)],
    "resnet50": resnet50(),
}  # fmt: skip


@st.composite
def layer_lists(draw, largest=14):
    dims = st.integers(1, 600) if draw(st.booleans()) else st.just(draw(st.integers(1, 600)))
    layers = []
    for i in range(draw(st.integers(0, largest))):
        kind = draw(st.sampled_from(["linear", "linear", "blocks", "diagonal", "norm", "float64"]))
        name = f"{draw(st.sampled_from('abc'))}.{i}"
        blocks = draw(st.integers(2, 5)) if kind == "blocks" else 1
        form = "diagonal" if kind == "diagonal" else "dense"
        dtype = "float64" if kind == "float64" else "float32"
        layers.append(
            norm(name, draw(dims)) if kind == "norm" else linear(name, draw(dims), draw(dims), blocks, form, dtype)
        )
    return layers
