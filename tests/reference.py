"""The slow, obvious, float64 oracle: K-FAC by loops over examples and outer products.

Every example is run through the model alone, so the gradient at a layer's output already is that of
the example's own loss terms and no scaling rule is needed. Shapes: B = blocks (groups of a
convolution, otherwise 1), S = shared positions, O = out features, I = in features (+1 with a folded
bias), T = loss terms. The curvature of a block is ``kron(A, G)``, acting on gradients ``[O, I]``
stacked column by column. ``example_rows[n][call]`` is a pair ``(a_rows [B, S, I], g_rows [B, S, O])``.

With ``block_dim`` a factor keeps its whole shape, with zeros between its pieces.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Form = Literal["unit", "full", "diagonal"]


# 1. One example at a time


def _size(batch) -> int:
    return len(batch[0] if isinstance(batch, tuple) else batch)


def _pick(batch, n: int):
    """Return example n of a tensor or a tuple of tensors, as a batch of one."""
    return tuple(t[n : n + 1] for t in batch) if isinstance(batch, tuple) else batch[n : n + 1]


def _forward(model: nn.Module, x, layers: list[str]):
    """Return the model's output and, per layer, the (input, output) of each of its calls."""
    calls = {name: [] for name in layers}

    def record(name):
        def hook(_module, inputs, output):
            calls[name].append((inputs[0].detach().clone(), output))
            return output.clone()  # a later in-place operation must not change what was recorded

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in layers]
    output = model(*x) if isinstance(x, tuple) else model(x)
    for handle in handles:
        handle.remove()
    return output, calls


def _pull_back(calls, output: Tensor, output_grad: Tensor):
    """Return, per layer and call, (input, gradient at the layer's output) for a gradient at ``output``."""
    result = {name: [] for name in calls}
    for name, layer_calls in calls.items():
        for a, y in layer_calls:
            (g,) = torch.autograd.grad(output, y, output_grad, retain_graph=True, materialize_grads=True)
            result[name].append((a, g))
    return result


def per_example(model: nn.Module, loss_fn: Callable, inputs, targets, layers: list[str]):
    """Return ``{layer: [example][call] -> (input, gradient of the example's loss at the output)}``.

    ``loss_fn(output, target)`` gets a batch of one and returns the *sum* over that example's terms.
    """
    assert all(p.dtype == torch.float64 for p in model.parameters()), "the oracle runs in float64"
    result = {name: [] for name in layers}
    for n in range(_size(inputs)):
        output, calls = _forward(model, _pick(inputs, n), layers)
        loss = loss_fn(output, _pick(targets, n))
        for name, pairs in _pull_back(calls, loss, torch.ones_like(loss)).items():
            result[name].append(pairs)
    return result


# 2. Rows, and gradients as matrices


def folds_bias(module: nn.Module) -> bool:
    bias = getattr(module, "bias", None)
    return bias is not None and bias.requires_grad


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored ``[in, out]``, as in transformers' Conv1D and in embeddings."""
    return isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"


def _pad(module, x: Tensor) -> Tensor:
    amounts = []  # F.pad wants the last dimension first
    for d in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[d] * (module.kernel_size[d] - 1)
            amounts += [total // 2, total - total // 2]
        elif module.padding == "valid":
            amounts += [0, 0]
        else:
            amounts += [module.padding[d], module.padding[d]]
    return F.pad(x, amounts, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def _patches(module, x: Tensor, positions) -> Tensor:
    """Return ``[B, S, C/B * kernel]``: what the kernel sees at each output position, per group."""
    padded = _pad(module, x)
    rows = []
    for image in padded:
        for position in itertools.product(*(range(size) for size in positions)):
            seen = []  # one [C] vector per kernel offset
            for offset in itertools.product(*(range(size) for size in module.kernel_size)):
                place = [
                    p * s + o * d for p, s, o, d in zip(position, module.stride, offset, module.dilation, strict=True)
                ]
                seen.append(image[(slice(None), *place)])
            rows.append(torch.stack(seen, dim=1).reshape(module.groups, -1))
    return torch.stack(rows, dim=1)


def _sources(module, x: Tensor, positions) -> Tensor:
    """Return ``[1, S, C * kernel]``: the pixel of each input channel that each tap of a transposed kernel brings to an
    output position; zero where there is none."""
    rows = []
    for image in x:
        for position in itertools.product(*(range(size) for size in positions)):
            seen = []  # one [C] vector per tap
            for tap in itertools.product(*(range(size) for size in module.kernel_size)):
                place, is_inside = [], True
                for d, (p, k) in enumerate(zip(position, tap, strict=True)):
                    away = p + module.padding[d] - k * module.dilation[d]
                    is_inside &= away % module.stride[d] == 0 and 0 <= away // module.stride[d] < image.shape[1 + d]
                    place.append(away // module.stride[d])
                seen.append(image[(slice(None), *place)] if is_inside else torch.zeros_like(image.flatten(1)[:, 0]))
            rows.append(torch.stack(seen, dim=1).reshape(-1))
    return torch.stack(rows)[None]


def rows(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(a_rows [B, S, I], g_rows [B, S, O])`` of one call on one example."""
    if isinstance(module, CONVOLUTIONS):
        a_rows = _patches(module, x, g.shape[2:])
        g_rows = g.movedim(1, -1).reshape(-1, module.groups, g.shape[1] // module.groups).movedim(0, 1)
    elif isinstance(module, TRANSPOSED):
        a_rows, g_rows = _sources(module, x, g.shape[2:]), g.movedim(1, -1).reshape(1, -1, g.shape[1])
    elif isinstance(module, nn.Embedding):
        kept = [s for s, token in enumerate(x.flatten().tolist()) if token != module.padding_idx]
        a_rows = F.one_hot(x.flatten()[kept], module.num_embeddings).to(g.dtype)[None]
        g_rows = g.reshape(-1, g.shape[-1])[kept][None]
    elif isinstance(module, nn.Linear) or _is_transposed(module):
        a_rows, g_rows = x.reshape(1, -1, x.shape[-1]), g.reshape(1, -1, g.shape[-1])
    else:
        raise TypeError(f"no rows for {type(module).__name__}")
    if folds_bias(module):
        a_rows = torch.cat([a_rows, torch.ones_like(a_rows[:, :, :1])], dim=2)
    return a_rows, g_rows


def all_rows(module: nn.Module, examples):
    """Return ``example_rows`` for one layer's entry of ``per_example``."""
    return [[rows(module, x, g) for x, g in calls] for calls in examples]


def gradient_blocks(module: nn.Module) -> Tensor:
    """Return the ``.grad`` as ``[B, O, I]``, the bias last; of a norm layer as ``[pC]``, gammas first."""
    if isinstance(module, NORMS):
        parts = [module.weight.grad, *([module.bias.grad] if folds_bias(module) else [])]
        return torch.cat([part.flatten() for part in parts])
    weight = module.weight.grad.T if _is_transposed(module) else module.weight.grad
    weight = weight.transpose(0, 1) if isinstance(module, TRANSPOSED) else weight
    blocks = getattr(module, "groups", 1)
    matrix = weight.reshape(blocks, weight.shape[0] // blocks, -1)
    if folds_bias(module):
        matrix = torch.cat([matrix, module.bias.grad.reshape(blocks, -1, 1)], dim=2)
    return matrix


def set_gradient_blocks(module: nn.Module, matrix: Tensor) -> None:
    """The inverse of ``gradient_blocks``."""
    if isinstance(module, NORMS):
        weight, bias = matrix[: module.weight.numel()], matrix[module.weight.numel() :]
    elif folds_bias(module):
        weight, bias = matrix[:, :, :-1], matrix[:, :, -1]
    else:
        weight, bias = matrix, None
    weight = weight[0].T if _is_transposed(module) else weight
    if isinstance(module, TRANSPOSED):
        weight = weight.reshape(module.weight.transpose(0, 1).shape).transpose(0, 1)
    module.weight.grad = weight.reshape(module.weight.shape).clone()
    if folds_bias(module):
        module.bias.grad = bias.reshape(module.bias.shape).clone()


# 3. Factors


def factors(example_rows, terms: float, weight_sharing: Literal["expand", "reduce"]) -> dict[str, Tensor]:
    a, g = next(pair for calls in example_rows for pair in calls)
    A = a.new_zeros(a.shape[0], a.shape[2], a.shape[2])
    G = g.new_zeros(g.shape[0], g.shape[2], g.shape[2])
    count = 0
    for a_rows, g_rows in itertools.chain(*example_rows):
        if weight_sharing == "reduce":
            a_rows = a_rows.sum(dim=1, keepdim=True) / max(a_rows.shape[1], 1)
            g_rows = g_rows.sum(dim=1, keepdim=True)
        count += a_rows.shape[1]
        for b in range(a_rows.shape[0]):
            for s in range(a_rows.shape[1]):
                A[b] += torch.outer(a_rows[b, s], a_rows[b, s])
                G[b] += torch.outer(g_rows[b, s], g_rows[b, s])
    return {"A": A / max(count, 1), "G": G / terms}


def exact_factors(model, inputs, layers, loss: Literal["cross_entropy", "mse"], terms: int, weight_sharing):
    """Return ``{layer: {"A", "G"}}`` with the Gauss-Newton G.

    The output is ``[1, ..., C]``, classes last; the loss is a mean over ``terms`` terms, each of them
    the cross-entropy, or the squared error averaged over C, averaged over the term's positions.
    Column c of the Hessian's root is sent back from all positions of an example at once.
    """
    examples = _size(inputs)
    columns: list[dict[str, list]] = []  # [c][layer][example] -> rows of each call
    for n in range(examples):
        output, calls = _forward(model, _pick(inputs, n), layers)
        classes = output.shape[-1]
        positions = output.numel() // classes
        columns = columns or [{name: [] for name in layers} for _ in range(classes)]
        for c, e in enumerate(torch.eye(classes, dtype=output.dtype)):
            if loss == "cross_entropy":
                p = output.detach().softmax(dim=-1)
                root = p[..., c : c + 1].sqrt() * (e - p)
            else:
                root = (2 / classes) ** 0.5 * e.expand_as(output)
            root = root * (terms / (examples * positions)) ** 0.5  # 1 where a term is one position
            for name, pairs in _pull_back(calls, output, root).items():
                columns[c][name].append([rows(model.get_submodule(name), x, g) for x, g in pairs])
    result = {}
    for name in layers:
        each = [factors(column[name], terms, weight_sharing) for column in columns]
        result[name] = {"A": each[0]["A"], "G": sum(f["G"] for f in each)}
    return result


# 3b. Factors in pieces (docs/notes/013-blocks.md)


def piece_widths(dim_units: int, unit: int, block_dim: int) -> list[int]:
    """Return the widths of the pieces of ``dim_units`` units of ``unit`` features each, without a bias."""
    if unit > block_dim:
        dim_units, unit = dim_units * unit, 1
    fit = block_dim // unit
    least = -(-dim_units // fit)
    for number in range(least, 2 * least):
        if dim_units % number == 0:
            return [dim_units // number * unit] * number
    wide = -(-dim_units // least)
    return [wide * unit] * (least - 1) + [(dim_units - wide * (least - 1)) * unit]


def layer_pieces(module: nn.Module, block_dim: int | None) -> dict[str, list[int]]:
    """Return the widths of the pieces of A and G of one block; of a factor that is not cut, its dimension.

    A folded bias counts where a factor is compared with ``block_dim``. If A is cut it is the last piece, of width 1.
    """
    weight = module.weight.T if _is_transposed(module) else module.weight
    weight = weight.transpose(0, 1) if isinstance(module, TRANSPOSED) else weight
    out, inputs = weight.shape[0] // getattr(module, "groups", 1), weight[0].numel()
    bias = int(folds_bias(module))
    result = {"A": [inputs + bias], "G": [out]}
    if block_dim is not None and out > block_dim:
        result["G"] = piece_widths(out, 1, block_dim)
    if block_dim is not None and inputs + bias > block_dim and not isinstance(module, nn.Embedding):
        taps = weight[0, 0].numel() if isinstance(module, CONVOLUTIONS) else 1
        result["A"] = piece_widths(inputs // taps, taps, block_dim) + [1] * bias
    return result


def piece_slices(widths: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(widths))
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


def keep_pieces(factor: Tensor, widths: list[int]) -> Tensor:
    """Return ``[B, D, D]`` with zeros between the pieces."""
    kept = torch.zeros_like(factor)
    for here in piece_slices(widths):
        kept[:, here, here] = factor[:, here, here]
    return kept


def cut_factors(module: nn.Module, whole: dict[str, Tensor], block_dim: int | None) -> dict[str, Tensor]:
    """Return A and G in pieces; the A of a bias that is cut off is the number 1."""
    widths = layer_pieces(module, block_dim)
    result = {key: keep_pieces(whole[key], widths[key]) for key in ("A", "G")}
    if folds_bias(module) and len(widths["A"]) > 1:
        result["A"][:, -1, -1] = 1.0
    return result


def eigenvectors(factor: Tensor, widths: list[int]) -> Tensor:
    """Return the eigenvectors ``[B, D, D]`` of each piece by itself, zeros between them."""
    vectors = torch.zeros_like(factor)
    for here in piece_slices(widths):
        vectors[:, here, here] = torch.linalg.eigh(factor[:, here, here]).eigenvectors
    return vectors


def improved(factor: Tensor, widths: list[int], old: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the next basis of ``warm-eigen`` and the factor with Rayleigh quotients for eigenvalues.

    ``old``: the last basis, columns of a piece by falling eigenvalues. Each piece is decomposed by itself.
    """
    vectors, used = torch.zeros_like(factor), torch.zeros_like(factor)
    for b, here in itertools.product(range(len(factor)), piece_slices(widths)):
        matrix = factor[b, here, here]
        Q = torch.linalg.eigh(matrix).eigenvectors if old is None else torch.linalg.qr(matrix @ old[b, here, here]).Q
        values = (Q * (matrix @ Q)).sum(dim=0)
        used[b, here, here] = Q @ values.diag() @ Q.T
        vectors[b, here, here] = Q[:, values.argsort(descending=True)]
    return vectors, used


# 4. Norm layers


def norm_rows(module: nn.Module, t: Tensor, examples: int | None = None) -> Tensor:
    """Return a norm layer's input or output gradient as ``[N, S, C]``; N is the leading size unless told."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        channels = module.weight.numel()
    else:
        channels, t = t.shape[1], t.movedim(1, -1)
    return t.reshape(examples or t.shape[0], -1, channels)


def normalised(module: nn.Module, x: Tensor, examples: int | None = None) -> Tensor:
    """Return x̂ ``[N, S, C]``, the input before gamma and beta, from the definition."""
    if isinstance(module, BATCH_NORMS):
        shape = [1, -1] + [1] * (x.dim() - 2)
        over = [d for d in range(x.dim()) if d != 1]
        mean, var = x.mean(dim=over), x.var(dim=over, correction=0)
        if not module.training and module.running_mean is not None:
            mean, var = module.running_mean, module.running_var
        x_hat = (x - mean.reshape(shape)) / (var.reshape(shape) + module.eps).sqrt()
    elif isinstance(module, nn.GroupNorm):
        grouped = x.reshape(x.shape[0], module.num_groups, -1)
        mean, var = grouped.mean(dim=2, keepdim=True), grouped.var(dim=2, correction=0, keepdim=True)
        x_hat = ((grouped - mean) / (var + module.eps).sqrt()).reshape(x.shape)
    else:
        over = list(range(-len(module.normalized_shape), 0))
        if isinstance(module, nn.LayerNorm):
            centred, eps = x - x.mean(dim=over, keepdim=True), module.eps
        else:
            centred, eps = x, torch.finfo(x.dtype).eps if module.eps is None else module.eps
        x_hat = centred / ((centred**2).mean(dim=over, keepdim=True) + eps).sqrt()
    return norm_rows(module, x_hat, examples)


def norm_factor(x_hat_rows, g_rows, terms: float, form: Form, has_bias: bool) -> Tensor:
    """Return F from ``[N, S, C]`` (or a list of ``[S, C]``): ``[C,p,p]``, ``[pC,pC]`` or ``[pC]``.

    The flat order is all gammas, then all betas; p is 2 with a bias and 1 without.
    """
    total = 0
    for x_hat, g in zip(x_hat_rows, g_rows, strict=True):
        u, w = (g * x_hat).sum(dim=0), g.sum(dim=0)
        gradients = [u, w] if has_bias else [u]
        if form == "unit":
            pairs = torch.stack(gradients, dim=1)
            total = total + torch.stack([torch.outer(v, v) for v in pairs])
        else:
            v = torch.cat(gradients)
            total = total + (torch.outer(v, v) if form == "full" else v**2)
    return total / terms


# 5. Preconditioning


def single_precondition(factor: Tensor, grad: Tensor, damping: float) -> Tensor:
    """Return ``(factor + damping I)^-1 grad``; with damping 0 null directions are left out."""
    if damping == 0:
        return torch.linalg.pinv(factor, hermitian=True) @ grad
    return torch.linalg.solve(factor + damping * torch.eye(len(grad), dtype=grad.dtype), grad)


def dense_precondition(A: Tensor, G: Tensor, grad_OI: Tensor, damping: float) -> Tensor:
    """Return ``(kron(A, G) + damping I)^-1 vec(grad)`` of one block, shaped like ``grad_OI``."""
    solution = single_precondition(torch.kron(A, G), grad_OI.T.reshape(-1), damping)
    return solution.reshape(grad_OI.T.shape).T


def factored_precondition(A: Tensor, G: Tensor, grad_OI: Tensor, damping: float) -> Tensor:
    """Return ``(G + sqrt(damping)/pi I)^-1 grad (A + pi sqrt(damping) I)^-1`` of one block."""
    a, g = A.trace().item() / len(A), G.trace().item() / len(G)
    pi = (a / g) ** 0.5 if a > 0 and g > 0 else 1.0
    eye_A, eye_G = torch.eye(len(A), dtype=A.dtype), torch.eye(len(G), dtype=G.dtype)
    inv_A = torch.linalg.inv(A + pi * damping**0.5 * eye_A)
    inv_G = torch.linalg.inv(G + damping**0.5 / pi * eye_G)
    return inv_G @ grad_OI @ inv_A


def norm_precondition(factor: Tensor, grad: Tensor, damping: float, form: Form) -> Tensor:
    """Solve with a norm layer's F; ``grad`` is ``[pC]``, gammas first."""
    if form == "full":
        return single_precondition(factor, grad, damping)
    blocks = factor.reshape(-1, 1, 1) if form == "diagonal" else factor
    vectors = grad.reshape(-1, len(blocks)).T  # [C, p]; the diagonal is pC blocks of 1
    solved = [single_precondition(f, v, damping) for f, v in zip(blocks, vectors, strict=True)]
    return torch.stack(solved).T.reshape(-1)


def relative_damping(damping: float, A: Tensor, G: Tensor) -> float:
    """Return ``damping`` times the mean eigenvalue over all blocks ``kron(A[b], G[b])`` of a layer."""
    means = [a.trace() / len(a) * g.trace() / len(g) for a, g in zip(A, G, strict=True)]
    return damping * (sum(means) / len(means)).item()


def relative_norm_damping(damping: float, factor: Tensor, form: Form) -> float:
    eigenvalues = factor if form == "diagonal" else factor.diagonal(dim1=-2, dim2=-1)
    return damping * eigenvalues.mean().item()


def ekfac_moments(example_rows, Q_A: Tensor, Q_G: Tensor, terms: float) -> Tensor:
    """Return ``1/T sum_n (Q_G' grad_n Q_A)^2`` as ``[B, O, I]``; grad_n sums positions and calls."""
    total = Q_A.new_zeros(Q_A.shape[0], Q_G.shape[1], Q_A.shape[1])
    for calls in example_rows:
        for b in range(Q_A.shape[0]):
            grad = torch.zeros_like(total[b])
            for a_rows, g_rows in calls:
                for a, g in zip(a_rows[b], g_rows[b], strict=True):
                    grad += torch.outer(g, a)
            total[b] += (Q_G[b].T @ grad @ Q_A[b]) ** 2
    return total / terms


def ekfac_rotate(moments: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """Carry ``[B, O, I]`` moments from the basis ``old = (Q_A, Q_G)`` to ``new`` by squared rotations."""
    rotation_A, rotation_G = (n.mT @ o for n, o in zip(new, old, strict=True))
    return rotation_G**2 @ moments @ (rotation_A**2).mT


def ekfac_precondition(moments: Tensor, Q_A: Tensor, Q_G: Tensor, grad_OI: Tensor, damping: float) -> Tensor:
    """Divide one block's gradient by ``moments + damping`` in the basis; 0/0 is left out."""
    curvature = moments + damping
    rotated = Q_G.T @ grad_OI @ Q_A
    rotated = torch.where(curvature > 0, rotated / curvature, torch.zeros_like(rotated))
    return Q_G @ rotated @ Q_A.T


# 6. Step control: dictionaries {layer: tensor} of preconditioned gradients v and gradients


def norm_rescale(v: dict[str, Tensor], grad: dict[str, Tensor]) -> dict[str, Tensor]:
    tiny = torch.finfo(torch.float64).tiny
    return {name: v[name] * (grad[name].norm() / v[name].norm().clamp(min=tiny)) for name in v}


def norm_global_rescale(v: dict[str, Tensor], grad: dict[str, Tensor]) -> dict[str, Tensor]:
    length = {"v": 0.0, "grad": 0.0}
    for name in v:
        length["v"] += (v[name] ** 2).sum().item()
        length["grad"] += (grad[name] ** 2).sum().item()
    scale = length["grad"] ** 0.5 / max(length["v"] ** 0.5, torch.finfo(torch.float64).tiny)
    return {name: v[name] * scale for name in v}


def kl_clip(v: dict[str, Tensor], grad: dict[str, Tensor], lr: float | dict[str, float], kappa: float):
    """Scale by ``min(1, sqrt(kappa / |sum lr^2 <v, grad>|))``; ``lr`` may differ between layers."""
    s = 0.0
    for name in v:
        s += (lr[name] if isinstance(lr, dict) else lr) ** 2 * (v[name] * grad[name]).sum().item()
    nu = 1.0 if s == 0 else min(1.0, (kappa / abs(s)) ** 0.5)
    return {name: v[name] * nu for name in v}


def norm_kl(v: dict[str, Tensor], grad: dict[str, Tensor], lr: float | dict[str, float], kappa: float, damping: float):
    """The gradient's length over all layers, unless that predicts a change ``sum lr^2 s^2 <v, grad - damping v>`` above
    kappa. With exact damping v^T F v is <v, grad> - damping |v|^2."""
    matched = norm_global_rescale(v, grad)
    change = 0.0
    for name in v:
        scale = (matched[name].norm() / v[name].norm()).item() if v[name].norm() > 0 else 0.0
        curved = (v[name] * (grad[name] - damping * v[name])).sum().item()
        change += (lr[name] if isinstance(lr, dict) else lr) ** 2 * scale**2 * curved
    shorter = 1.0 if abs(change) <= kappa else (kappa / abs(change)) ** 0.5
    return {name: matched[name] * shorter for name in v}


def default_length(options: dict) -> str:
    """What K-FAC chooses with SGD."""
    return "norm-global" if options.get("damping_mode") == "relative" else "norm-kl"


# 7. Training


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    damping: float = 1e-3
    damping_mode: Literal["absolute", "relative"] = "absolute"
    factor_decay: float = 0.95
    factor_interval: int = 1
    inverse_interval: int = 1
    rescale: Literal["none", "norm", "norm-global", "norm-kl", "kl-clip"] = "norm"
    kl_clip: float = 1e-3
    weight_sharing: Literal["expand", "reduce"] = "expand"
    solver: Literal["eigen", "cholesky", "warm-eigen"] = "eigen"
    curvature: Literal["kfac", "ekfac"] = "kfac"
    norm_form: Form = "unit"
    loss_terms: Literal["batch", "token"] | int | Callable = "batch"
    """T of a step; a function of (inputs, targets) for padded or ignored labels."""
    block_dim: int | None = None
    lr: float = 0.1
    momentum: float = 0.0


def averaged(old, batch: Tensor, decay: float):
    value, weight = old or (torch.zeros_like(batch), 0.0)
    return decay * value + batch, decay * weight + 1.0


class ReferenceKFAC:
    """K-FAC with SGD on whole (global) batches; ``layers`` are preconditioned, the rest is plain SGD."""

    def __init__(
        self,
        model_factory: Callable[[], nn.Module],
        layers: list[str],
        loss_fn: Callable,
        settings: ReferenceSettings,
    ):
        self.model = model_factory().double()
        self.modules = {name: self.model.get_submodule(name) for name in layers}
        assert not any(isinstance(m, BATCH_NORMS) for m in self.model.modules()), "examples are run alone"
        self.loss_fn, self.settings, self.steps = loss_fn, settings, 0
        self.running = {name: {} for name in layers}  # {layer: {"A", "G", "moments" or "F": (value, weight)}}
        self.used = {}  # {layer: factors at the last refresh}
        self.basis = {}  # {layer: (Q_A, Q_G)}; with warm-eigen {layer: {key: Q}}
        self.velocity = {}

    def run(self, batches) -> list[float]:
        """Take one step per (inputs, targets) and return the losses seen."""
        return [self.step(inputs, targets) for inputs, targets in batches]

    def step(self, inputs, targets) -> float:
        loss, terms = self._backward(inputs, targets)
        if self.steps % self.settings.factor_interval == 0:
            self._measure(inputs, targets, terms)
        if self.steps % self.settings.inverse_interval == 0:
            for name in self.modules:
                self._refresh(name)
        self._precondition()
        self._sgd()
        self.steps += 1
        return loss

    def factor(self, name: str, key: str) -> Tensor:
        value, weight = self.running[name][key]
        return value / weight

    def _backward(self, inputs, targets):
        shape = (inputs[0] if isinstance(inputs, tuple) else inputs).shape
        terms = self.settings.loss_terms
        if terms == "batch":
            terms = shape[0]
        elif terms == "token":
            terms = shape[0] * shape[1]
        elif callable(terms):
            terms = terms(inputs, targets)
        self.model.zero_grad()
        total = 0.0
        for n in range(_size(inputs)):
            output = _forward(self.model, _pick(inputs, n), [])[0]
            loss = self.loss_fn(output, _pick(targets, n)) / terms
            loss.backward()
            total += loss.item()
        return total, terms

    def _measure(self, inputs, targets, terms) -> None:
        s = self.settings
        recorded = per_example(self.model, self.loss_fn, inputs, targets, list(self.modules))
        for name, module in self.modules.items():
            running = self.running[name]
            if isinstance(module, NORMS):
                calls = list(itertools.chain(*recorded[name]))
                x_hat = [normalised(module, x, 1)[0] for x, _ in calls]
                g = [norm_rows(module, g, 1)[0] for _, g in calls]
                new = {"F": norm_factor(x_hat, g, terms, s.norm_form, folds_bias(module))}
            else:
                example_rows = all_rows(module, recorded[name])
                new = factors(example_rows, terms, s.weight_sharing)
                if isinstance(module, nn.Embedding):  # diagonal A, which under expand it is anyway
                    new["A"] = torch.diag_embed(new["A"].diagonal(dim1=1, dim2=2))
                new = cut_factors(module, new, s.block_dim)
                has_moments = not isinstance(module, nn.Embedding)  # which keep K-FAC's eigenvalues
                if s.curvature == "ekfac" and has_moments and name in self.basis:
                    new["moments"] = ekfac_moments(example_rows, *self.basis[name], terms)
            for key, batch in new.items():
                running[key] = averaged(running.get(key), batch, s.factor_decay)

    def _refresh(self, name: str) -> None:
        running = self.running[name]
        self.used[name] = {key: self.factor(name, key) for key in running if key != "moments"}
        module, solver = self.modules[name], self.settings.solver
        if "F" in running:
            if solver == "warm-eigen" and self.settings.norm_form == "unit":
                self._improve(name, "F", [running["F"][0].shape[-1]])
            return
        widths = layer_pieces(module, self.settings.block_dim)
        if solver == "warm-eigen":
            assert self.settings.curvature == "kfac"
            for key in ["G"] if isinstance(module, nn.Embedding) else ["A", "G"]:  # a diagonal's basis is exact
                self._improve(name, key, widths[key])
        if self.settings.curvature == "ekfac":
            basis = tuple(eigenvectors(self.used[name][key], widths[key]) for key in ("A", "G"))
            if "moments" in running:
                value, weight = running["moments"]
                running["moments"] = ekfac_rotate(value, self.basis[name], basis), weight
            self.basis[name] = basis

    def _improve(self, name: str, key: str, widths: list[int]) -> None:
        bases = self.basis.setdefault(name, {})
        bases[key], self.used[name][key] = improved(self.used[name][key], widths, bases.get(key))

    def _precondition(self) -> None:
        s = self.settings
        grads = {name: gradient_blocks(module) for name, module in self.modules.items()}
        v = {name: self._solve(name, grads[name]) for name in self.modules}
        if s.rescale == "norm":
            v = norm_rescale(v, grads)
        elif s.rescale == "norm-global":
            v = norm_global_rescale(v, grads)
        elif s.rescale == "norm-kl":
            v = norm_kl(v, grads, s.lr, s.kl_clip, s.damping if s.damping_mode == "absolute" else 0.0)
        elif s.rescale == "kl-clip":
            v = kl_clip(v, grads, s.lr, s.kl_clip)
        for name, module in self.modules.items():
            set_gradient_blocks(module, v[name])

    def _solve(self, name: str, grad: Tensor) -> Tensor:
        s, used, damping = self.settings, self.used[name], self.settings.damping
        if "F" in used:
            if s.damping_mode == "relative":
                damping = relative_norm_damping(damping, used["F"], s.norm_form)
            return norm_precondition(used["F"], grad, damping, s.norm_form)
        if s.damping_mode == "relative":
            damping = relative_damping(damping, used["A"], used["G"])
        if s.curvature == "ekfac" and "moments" in self.running[name]:
            blocks = zip(self.factor(name, "moments"), *self.basis[name], grad, strict=True)
            return torch.stack([ekfac_precondition(*block, damping) for block in blocks])
        solve = factored_precondition if s.solver == "cholesky" else dense_precondition
        blocks = zip(used["A"], used["G"], grad, strict=True)
        return torch.stack([solve(*block, damping) for block in blocks])

    @torch.no_grad()
    def _sgd(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            old = self.velocity.get(name)
            self.velocity[name] = p.grad.clone() if old is None else self.settings.momentum * old + p.grad
            p -= self.settings.lr * self.velocity[name]
