"""Large-batch techniques of Osawa et al. (CVPR 2019) and common augmentation. Nothing here synchronizes the device.

Input: images, targets, models, epochs. Output: augmented batches, learning rates. Owns: the state of ``RunningMixup``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd.graph import Node

Schedule = Callable[[float], float]  # from an epoch, which may be a fraction, to a learning rate
WarmdownForm = Literal["geometric", "osawa"]
NormPairs = dict[str, tuple[nn.Module, nn.Module]]
_LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORM_TYPES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def polynomial_decay(lr: float, *, start: float, end: float, power: float = 2.0) -> Schedule:
    """Return ``lr`` before epoch ``start``, ``lr * (1 - (e - start) / (end - start)) ** power`` from it, then 0."""
    ok = lr > 0 and power > 0 and start < end
    _require(ok, f"use lr > 0, power > 0 and start < end, not {lr=}, {power=}, {start=}, {end=}")
    return lambda epoch: lr * (1 - min(max((epoch - start) / (end - start), 0.0), 1.0)) ** power


def with_warmup(schedule: Schedule, *, length: float, first: float = 0.1) -> Schedule:
    """Return the schedule multiplied by a factor that rises linearly from ``first`` at epoch 0 to 1 at epoch
    ``length``."""
    _require(length > 0 and 0 <= first <= 1, f"use length > 0, first in [0, 1], not {length=}, {first=}")
    return lambda epoch: schedule(epoch) * min(1.0, first + (1 - first) * epoch / length)


def coupled_momentum(lr: float, *, lr0: float, momentum0: float) -> float:
    """Return the momentum for which momentum / lr equals ``momentum0 / lr0``."""
    momentum = momentum0 / lr0 * lr if lr0 > 0 else math.nan
    _require(0 <= momentum < 1, f"{lr=} gives momentum {momentum:.3g}, not in [0, 1); lr0={lr0} must be the peak lr")
    return momentum


def set_lr(optimizer: torch.optim.SGD, epoch: float, schedule: Schedule, *, lr0: float, momentum0: float) -> None:
    """Set the learning rate of this epoch, and the momentum coupled to it, in every parameter group."""
    momentum = coupled_momentum(lr := schedule(epoch), lr0=lr0, momentum0=momentum0)
    for group in optimizer.param_groups:
        _require("momentum" in group, f"{type(optimizer).__name__} has no momentum to couple to its lr; use SGD")
        group["lr"] = (
            group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
        )  # CUDA graphs captured the tensor
        group["momentum"] = momentum


def norm_followed_layers(model: nn.Module, *inputs: Any) -> NormPairs:
    """Return ``{name: (layer, norm)}`` for layers whose output is used only as the input of a norm layer.

    Runs the bare model (without DDP and K-FAC) once, in eval mode, so nothing changes. An output is identified by its
    autograd node: any operation in between, in-place ones included, creates another node. Layers and norms that are
    called several times are excluded, as are weights that are frozen, shared or parametrized.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, _LAYER_TYPES + _NORM_TYPES)}
    calls: list[tuple[nn.Module, Node | None, Node | None]] = []
    hooks = [m.register_forward_hook(lambda m, x, y: calls.append((m, x[0].grad_fn, y.grad_fn))) for m in names]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.enable_grad():
            output = model.eval()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    _require(isinstance(output, Tensor), f"the model returns a {type(output).__name__}; wrap it to return its logits")
    uses, times = _uses(output), Counter(module for module, _, _ in calls)
    holders = Counter(id(p) for module in modes for p in module._parameters.values() if p is not None)
    norms = {x: norm for norm, x, y in calls if x and y in uses and isinstance(norm, _NORM_TYPES) and times[norm] == 1}
    return {
        names[layer]: (layer, norms[y])
        for layer, _, y in calls
        if isinstance(layer, _LAYER_TYPES) and times[layer] == 1 and y in norms and uses[y] == 1
        if layer.weight.requires_grad and holders[id(layer.weight)] == 1
    }


def _uses(output: Tensor) -> Counter[Node | None]:
    """Return how often each node of the autograd graph is used, by another node or as the output."""
    uses = Counter(found := [output.grad_fn])
    for node in found:  # the list grows while it is traversed
        before = [n for n, _ in node.next_functions] if node else []
        found.extend(n for n in set(before) if n not in uses)
        uses.update(before)
    return uses


@torch.no_grad()
def rescale_weights(layers: NormPairs) -> None:
    """Scale each weight to the norm ``sqrt(2 * d_out)`` in place; call it after each update. A zero weight stays zero.
    Bias and running statistics are scaled too, so the function of the network does not change, in training or
    evaluation, except through the eps of the norm layers."""
    for layer, norm in layers.values():
        weight = layer.get_parameter("weight")
        length = torch.linalg.vector_norm(weight)
        scale = torch.where(length > 0, math.sqrt(2 * len(weight)) / length, 1.0)
        for scaled in (weight, layer.bias, getattr(norm, "running_mean", None)):
            if isinstance(scaled, Tensor):
                scaled.mul_(scale)
        if isinstance(variance := getattr(norm, "running_var", None), Tensor):
            variance.mul_(scale**2)


class RunningMixup:
    """Mixes each batch with the previous *mixed* batch, with a weight drawn from Beta(alpha, alpha) on the host.
    Rows without a predecessor, such as those of the first batch, are not mixed; after a smaller batch, the unused
    predecessors are kept for the next one."""

    def __init__(self, alpha: float = 0.4, *, seed: int = 0) -> None:
        _require(alpha > 0, f"{alpha=} must be > 0; for no mixing omit RunningMixup")
        self.alpha, self.random = alpha, random.Random(seed)
        self.previous: tuple[Tensor, Tensor] | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed images and mixed soft targets ``[N, classes]``; both are new tensors."""
        share = self.random.betavariate(self.alpha, self.alpha)
        old = self.previous or (images[:0], targets[:0])
        (images, next_images), (targets, next_targets) = _mix(images, old[0], share), _mix(targets, old[1], share)
        self.previous = next_images, next_targets
        return images, targets

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "previous": self.previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])
        self.previous = state["previous"]


def _mix(new: Tensor, old: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the mixed batch, and the predecessors for the rows of the next batch."""
    _require(new.is_floating_point(), f"{new.dtype} cannot be mixed; use floats, for class numbers soft_targets(...)")
    _require(new.shape[1:] == old.shape[1:], f"{[*new.shape]} follows {[*old.shape]}; use another RunningMixup")
    both, old = min(len(new), len(old)), old.to(new)
    mixed = torch.cat([share * new[:both] + (1 - share) * old[:both], new[both:]])
    return mixed, torch.cat([mixed, old[both:]])


def zero_random_erasing(images: Tensor, *, p: float = 0.5, generator: Generator | None = None) -> Tensor:
    """Return images ``[N, C, H, W]`` in which, with probability ``p`` each, a rectangle is set to zero.

    Its area is uniform in 2 to 25% of the image, its height / width log-uniform in 0.3 to 1 / 0.3; it is clipped to
    the image.
    """
    _require(images.ndim == 4 and 0 <= p <= 1, f"use images [N, C, H, W], p in [0, 1], not {[*images.shape]}, {p=}")
    height, width = images.shape[2:]
    chance, share, shape, top, left = torch.rand(5, len(images), 1, generator=generator, device=images.device)
    size, ratio = (0.02 + 0.23 * share) * height * width, 0.3 ** (1 - 2 * shape)
    rows = _interval(top, (size * ratio).sqrt(), height) & (chance < p)
    columns = _interval(left, (size / ratio).sqrt(), width)
    return images.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0)


def _interval(place: Tensor, length: Tensor, size: int) -> Tensor:
    """Return a mask ``[N, size]`` that is true on ``length`` consecutive pixels (at least one). ``place`` in [0, 1)
    determines the position."""
    length = length.round().clamp(1, size)
    first = (place * (size - length + 1)).floor().minimum(size - length)
    pixel = torch.arange(size, device=place.device)
    return (pixel >= first) & (pixel < first + length)


def crop_and_flip(images: Tensor, *, padding: int = 4, flip: float = 0.5, generator: Generator | None = None) -> Tensor:
    """Return random crops of the zero-padded images ``[N, C, H, W]``, mirrored with probability ``flip``."""
    ok = images.ndim == 4 and padding >= 0 and 0 <= flip <= 1
    _require(ok, f"use images [N, C, H, W], padding >= 0, flip in [0, 1], not {[*images.shape]}, {padding=}, {flip=}")
    (count, _, height, width), device = images.shape, images.device
    down, right = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator, device=device)
    mirrored = torch.rand(count, 1, generator=generator, device=device) < flip
    rows, columns = torch.arange(height, device=device) + down, torch.arange(width, device=device)
    columns = torch.where(mirrored, columns.flip(0), columns) + right
    cut = F.pad(images, (padding,) * 4).take_along_dim(rows[:, None, :, None], 2)
    return cut.take_along_dim(columns[:, None, None, :], 3)


def soft_targets(labels: Tensor, num_classes: int, *, smoothing: float = 0.1) -> Tensor:
    """Return ``(1 - smoothing) * onehot + smoothing / num_classes``, ``[N, num_classes]``."""
    _require(0 <= smoothing <= 1, f"{smoothing=} must be in [0, 1]; 0 gives one-hot targets")
    return (1 - smoothing) * F.one_hot(labels, num_classes) + smoothing / num_classes


def soft_cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits with soft targets, both ``[N, classes]``, mean over the batch."""
    return F.cross_entropy(output, targets)


def damping_warmdown(first: float, last: float, *, steps: int, form: WarmdownForm = "geometric") -> Schedule:
    """Return a schedule for ``KFAC(..., damping=...)``, a function of the step.

    ``"geometric"`` reaches ``last`` after ``steps``. ``"osawa"`` approaches it: ``d <- (1 - a) * d + a * last`` with
    ``a = 2 * log10(first / last) / steps``.
    """
    ok = 0 < last <= first and steps > 0 and form in get_args(WarmdownForm)
    _require(
        ok, f"use first >= last > 0, steps > 0, a form of {get_args(WarmdownForm)}, not {(first, last, steps, form)}"
    )
    if form == "geometric":
        return lambda step: first * (last / first) ** min(step / steps, 1.0)
    rate = 2 * math.log10(first / last) / steps
    _require(rate <= 1, f"{steps=} are too few to go from {first} to {last}; use {math.ceil(rate * steps)}")
    return lambda step: last + (first - last) * (1 - rate) ** step


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
