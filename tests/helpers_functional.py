"""Twins of models: the same functions of the same weights, with every Linear layer called, for the oracle."""

import copy
import math

import reference as ref
import torch
from helpers_capture import summed
from models.sequences import Translator
from models.vision import ShiftedWindowAttention, Swin, ViT
from torch import nn

WHOLE = {"block_dim": None}
MODELS = [ViT, Swin, Translator]


def make(kind, seed=0, size=4, **options):
    """A model in float64, inputs and a target."""
    torch.manual_seed(seed)
    model = kind(**options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    shapes = [(size, 5, 4), (size, 3, 4)] if kind is Translator else [(size, 3, 8, 8)]
    inputs = tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    with torch.no_grad():
        target = torch.randn(model(*inputs).shape, generator=generator, dtype=torch.float64)
    return model, inputs, target


class PlainAttention(nn.Module):
    """``nn.MultiheadAttention`` written out, with a layer for each projection."""

    def __init__(self, attention):
        super().__init__()
        self.heads, self.batch_first = attention.num_heads, attention.batch_first
        width = attention.embed_dim
        if attention.in_proj_weight is not None:
            weights = attention.in_proj_weight.chunk(3)
        else:
            weights = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
        biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out = _linear(attention.out_proj.weight, attention.out_proj.bias)
        assert self.out.out_features == width
        self._qkv_same_embed_dim = False  # torch's encoder layer asks

    def forward(self, query, key, value, attn_mask=None, **_):
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(query), self.k(key), self.v(value))
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if attn_mask is None else scores + attn_mask
        output = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output if self.batch_first else output.transpose(0, 1), None


def _linear(weight, bias):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer


class CalledWindows(ShiftedWindowAttention):
    def forward(self, x):
        n, height, width, c = x.shape
        w, s = self.window, self.shift
        x = torch.roll(x, (-s, -s), dims=(1, 2))
        x = x.unfold(1, w, w).unfold(2, w, w).permute(0, 1, 2, 4, 5, 3).reshape(-1, w * w, c)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.relative_position_bias()
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x.view(n, height // w, width // w, w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(n, height, width, c)
        return torch.roll(x, (s, s), dims=(1, 2))


def twin(model):
    """A copy in which attention calls its projections, and the names in ``kfac.factors()`` by those in the copy."""
    copied, names = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            parent, _, last = name.rpartition(".")
            setattr(copied.get_submodule(parent), last, PlainAttention(module))
            names |= {f"{name}.{key}": f"{name}.in_proj.{key}" for key in "qkv"}
            names[f"{name}.out"] = f"{name}.out_proj"
        elif isinstance(module, ShiftedWindowAttention):
            copied.get_submodule(name).__class__ = CalledWindows
    return copied, names


def oracle_factors(model, inputs, target, loss=summed):
    """``{layer: {"A", "G"}}`` of all Linear layers and convolutions, named as in ``kfac.factors()``, by the outer
    products of the twin over examples that are run alone."""
    copied, names = twin(model)
    layers = [n for n, m in copied.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    recorded = ref.per_example(copied, loss, inputs, target, layers)
    rows = {name: ref.all_rows(copied.get_submodule(name), recorded[name]) for name in layers}
    found = {name: ref.factors(rows[name], len(target), "expand") for name in layers}
    return {names.get(n, n): {key: f.squeeze(0) for key, f in factors.items()} for n, factors in found.items()}
