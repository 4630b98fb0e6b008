"""The transport of a single rank: its program is empty, and it agrees with itself.

Input: tensors, numbers and errors of this rank. Output: the same. Owns: nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from dkfac.comm.groups import NoGroups
from dkfac.comm.transport import Transport
from dkfac.plan.plan import Plan


class OneRank(Transport):
    """What programs do not list, without communication."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, NoGroups(), device)

    def check_unmoved(self, layers: Any) -> None:
        """Nothing is sent, so K-FAC's state follows a model that is converted or moved."""

    def total(self, values: Tensor) -> Tensor:
        return values

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        return [values]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def tell(self, text: str) -> str:
        return text

    def broadcast(self, values: Tensor) -> Tensor:
        return values

    def defer(self, error: BaseException) -> NoReturn:
        raise error

    def raise_everywhere(self, error: BaseException | None) -> NoReturn:
        raise error or RuntimeError("K-FAC's part of the step failed, and does not say how")
