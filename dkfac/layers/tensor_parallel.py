"""Linear layers that ``parallelize_module`` has split by columns or rows (tensor parallelism).

Input: a model, and the inputs and output gradients of its layers. Output: an error for what is not supported, and whole
tensors. Owns: nothing.

All ranks see the same examples. A weight is a DTensor that is split like a shard of FSDP2; parameters of other layers
are whole, and equal, on each rank. See ``docs/notes/021-sharded.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from dkfac.layers.sharded import is_sharded

PLACEMENTS = {"weight": (["Shard(0)"], ["Shard(1)"]), "bias": (["Shard(0)"], ["Replicate()"])}
"""How ColwiseParallel and RowwiseParallel place the parameters of a Linear layer."""


def whole_of(tensor: Tensor) -> Tensor:
    """Return a tensor of all features. Of a DTensor a collective on its mesh: all of its ranks call it in one order."""
    if not is_sharded(tensor):
        return tensor
    split: Any = tensor
    whole: Any = split.full_tensor()
    return whole.wait() if hasattr(whole, "wait") else whole  # type: ignore[no-any-return]


def check_split(model: nn.Module, managed: Iterable[int]) -> None:
    """Raise if tensor parallelism is used in a way that is not supported. ``managed``: ids of FSDP2's parameters."""
    known = set(managed)
    for path, module in model.named_modules():
        is_split = False
        for key, p in module._parameters.items():
            if p is None or not is_sharded(p):
                continue
            whole: Any = p
            if id(p) in known and (len(whole.placements) < 2 or not hasattr(whole.placements[0], "dim")):
                continue  # FSDP2 or HSDP alone
            name = f"{path}.{key}".lstrip(".")
            placements = [str(placement) for placement in _plain(whole.placements[-1 if known else 0 :])]
            if known and id(p) not in known:
                _refuse(
                    name, whole.placements, "FSDP2 shards others, but not it: call fully_shard on the whole model too"
                )
            if not isinstance(module, nn.Linear):
                what = f"it belongs to a {type(module).__name__}, as with SequenceParallel or a split embedding"
                _refuse(name, whole.placements, what)
            if placements not in PLACEMENTS.get(key, ()):
                _refuse(name, whole.placements, "neither ColwiseParallel nor RowwiseParallel splits it like this")
            is_split = True
        if is_split:
            _check_layouts(path, module)


def check_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise if a gradient is not placed like its parameter: ranks saw different examples, or parts of a sequence."""
    for p in parameters:
        split: Any = p
        if is_sharded(p) and split.grad.placements != split.placements:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} has placements {split.grad.placements}, the "
                f"parameter {split.placements}: dkfac supports tensor parallelism whose ranks see the same examples, "
                f"without sequence parallelism"
            )


def _plain(placements: Any) -> Iterator[str]:
    """Yield placements without what only says how they came about."""
    for placement in placements:
        kind = type(placement).__name__
        yield f"{kind}({placement.dim})" if kind == "Shard" else f"{kind}()"


def _check_layouts(path: str, module: nn.Module) -> None:
    """Raise if a style splits the input or the output of a layer by examples or positions, not by features."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        for cell in getattr(hook, "__closure__", None) or ():
            style = cell.cell_contents
            for layout in style.args[0] if isinstance(style, functools.partial) and style.args else ():
                if getattr(layout, "dim", -1) != -1 or type(layout).__name__ == "Partial":
                    raise RuntimeError(
                        f"layer {path!r} is parallelized with a layout {layout} of its input or output: dkfac does not "
                        f"support sequence parallelism, only layouts Replicate() and Shard(-1), by features"
                    )


def _refuse(name: str, placements: Any, why: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} is a DTensor with placements {placements}: {why}. dkfac preconditions parameters that "
        f"fully_shard splits (FSDP2, HSDP), or Linear layers that parallelize_module splits by ColwiseParallel and "
        f"RowwiseParallel over all ranks"
    )
