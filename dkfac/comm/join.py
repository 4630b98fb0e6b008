"""Uneven inputs: what K-FAC does on a rank that has run out of batches, under torch's ``Join`` context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel


def not_joined() -> Any:
    """Return what a joinable thing has outside a ``Join`` context."""
    return _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def hook(step: Callable[[], None]) -> JoinHook:
    """Return a hook that takes a step for each one the other ranks take."""

    class Hook(JoinHook):
        def main_hook(self) -> None:
            step()

    return Hook()


def process_group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def ddp_joins() -> bool:
    """Whether a DDP's forward runs now inside a ``Join`` context."""
    ddp = DistributedDataParallel._active_ddp_module
    return ddp is not None and bool(ddp._join_config.enable)
