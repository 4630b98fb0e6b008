"""Data sets that are held in memory as tensors.

Input: tensors. Output: the examples at given indices. Owns: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tensors:
    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def get(self, index: Tensor, *, seed: int | None) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True, slots=True)
class Text:
    """Text as character indices. An example is a chunk of ``context`` characters, its target the chunk shifted by
    one."""

    characters: Tensor
    context: int
    num_kinds: int

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.context

    def get(self, index: Tensor, *, seed: int | None) -> tuple[Tensor, Tensor]:
        begins = index * self.context
        if seed is not None:  # shift the chunk boundaries
            begins = (begins + seed % self.context).clamp(max=len(self.characters) - self.context - 1)
        rows = begins[:, None]
        stretch = self.characters[rows + torch.arange(self.context + 1)]
        return stretch[:, :-1], stretch[:, 1:]
