"""Recompute the normalized input of a norm layer.

Input: a norm module and its input. Output: what the module multiplies by its weight. Owns: nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def uses_batch_stats(module: nn.Module) -> bool:
    """Return whether a batch norm uses the statistics of the batch; must be called during its forward."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.training or module.running_mean is None


def normalised(module: nn.Module, x: Tensor, dtype: torch.dtype, *, batch_stats: bool) -> Tensor:
    """Return what the layer multiplies by its weight, with the shape of ``x``."""
    input_eps = torch.finfo(x.dtype).eps
    x = x.to(dtype)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if batch_stats:
            dims = [d for d in range(x.ndim) if d != 1]
            variance, mean = torch.var_mean(x, dims, correction=0)
        else:
            assert module.running_mean is not None
            assert module.running_var is not None
            variance, mean = module.running_var.to(x.dtype), module.running_mean.to(x.dtype)
        return (x - mean.reshape(shape)) * (variance.reshape(shape) + module.eps).rsqrt()
    if isinstance(module, nn.GroupNorm):
        grouped = x.reshape(x.shape[0], module.num_groups, -1)
        variance, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        return ((grouped - mean) * (variance + module.eps).rsqrt()).reshape(x.shape)
    weight = module.weight
    assert isinstance(weight, Tensor)
    dims = list(range(x.ndim - weight.ndim, x.ndim))
    if isinstance(module, nn.LayerNorm):
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return (x - mean) * (variance + module.eps).rsqrt()
    assert isinstance(module, nn.RMSNorm)
    eps = input_eps if module.eps is None else module.eps
    return x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
