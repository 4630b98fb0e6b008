"""ResNets as published, for images of 32 x 32 pixels and for larger images.

Input: depth, classes, width. Output: an initialized ``nn.Module``. Owns: nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions. ``free``: the shortcut has no parameters and pads channels with zeros (CIFAR)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, *, free: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = PaddedShortcut(stride, width - inputs) if free else shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 convolution has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x), inplace=True)


class PaddedShortcut(nn.Module):
    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.extra = stride, extra

    def forward(self, x: Tensor) -> Tensor:
        half = self.extra // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.extra - half))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def build_cifar_resnet(depth: int, num_classes: int = 10) -> nn.Module:
    """Return a ResNet of 6n + 2 layers for 32 x 32 pixels (He et al. 2016, section 4.2): 20, 32, 44, 56, 110."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"a ResNet for CIFAR has 6n + 2 layers, for example 20, 32 or 56; not {depth}")
    widths = [16, *(width for width in (16, 32, 64) for _ in range(depth // 6))]
    blocks = [BasicBlock(a, b, 2 if a != b else 1, free=True) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return _initialised(
        nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
    )


_BLOCKS_BY_DEPTH: dict[int, tuple[type[BasicBlock] | type[Bottleneck], Sequence[int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def build_resnet(depth: int, num_classes: int = 1000, *, width: int = 64, small_images: bool = False) -> nn.Module:
    """Return a ResNet of 18, 34, 50, 101 or 152 layers.

    ``width``: channels of the first layer, 64 as published. ``small_images``: do not downsample in the first layers.
    """
    if depth not in _BLOCKS_BY_DEPTH:
        raise ValueError(f"depth={depth} is not one of {', '.join(map(str, _BLOCKS_BY_DEPTH))}")
    block, numbers = _BLOCKS_BY_DEPTH[depth]
    first = nn.Conv2d(3, width, 3, 1, 1, bias=False) if small_images else nn.Conv2d(3, width, 7, 2, 3, bias=False)
    modules: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    modules += [] if small_images else [nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, number in enumerate(numbers):
        for place in range(number):
            modules.append(block(inputs, width * 2**stage, 2 if stage and not place else 1))
            inputs = width * 2**stage * block.expansion
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)]
    return _initialised(nn.Sequential(*modules, *head))


def _initialised(model: nn.Module) -> nn.Module:
    """Initialize convolutions as He et al. do, and the last batch norm of each bottleneck to zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
    return model
