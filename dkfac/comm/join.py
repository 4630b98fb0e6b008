"""Uneven inputs: K-FAC on a rank that has run out of batches, in torch's ``Join`` context.

Input: the function that takes a step. Output: what ``Join`` expects of a ``Joinable``. Owns: nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel


def not_joined() -> Any:
    """Return the configuration of a ``Joinable`` outside a ``Join`` context."""
    return _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def hook(step: Callable[[], None]) -> JoinHook:
    """Return a hook that takes a step for each one that the other ranks take."""

    class Hook(JoinHook):
        def main_hook(self) -> None:
            step()

    return Hook()


def process_group(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def ddp_joins() -> bool:
    """Return whether a DDP forward is running inside a ``Join`` context."""
    ddp = DistributedDataParallel._active_ddp_module
    return ddp is not None and bool(ddp._join_config.enable)
