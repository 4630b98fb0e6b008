"""Settings: what was given, and what is chosen by the optimizer, the device and a rank's role."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.comm import groups
from dkfac.settings import Settings

ADAM: dict[str, Any] = {
    "solver": "warm-eigen", "factor_interval": 20, "inverse_interval": 20, "warmup_refresh": (5, 500),
    "factor_decay": 0.8,
}  # fmt: skip
"""The rhythm of Adam in the eigenbasis, if none is given: its bases age faster than K-FAC's inverses, above all early,
and quick refreshes pay for it (docs/notes/005-adam-eigen.md). Factors are measured when they are decomposed."""
SPEED = {"solver", "tf32", "cuda_graph", "spread_refresh"}
PLAIN = {
    "accumulate", "announce", "basis_dtype", "batch_dim", "cluster", "curvature", "damping", "damping_mode",
    "factor_decay", "factor_interval", "inverse_interval", "kl_clip", "loss_terms", "max_dim", "max_failures",
    "norm_damping", "norm_form", "replicate_factors", "rescale", "skip", "split_dim", "statistics_fraction", "strategy",
    "warmup_refresh", "weight_sharing", "wire_dtype", "worker_fraction",
}  # fmt: skip
"""Options that say nothing of how steps become fast on a GPU, and go with all that does."""
GRAPH_ELEMENTS = 2**28
"""Parameters above which the memory of graphs, several times theirs, is not taken unasked."""


def choose_settings(
    settings: Settings | None, options: dict[str, Any], model: nn.Module, optimizer: Any, group: Any, roles: Any
) -> Settings:
    """Return what was given in one of two ways, with what it leaves open chosen by optimizer, device and role."""
    chosen = resolve_settings(settings, options, optimizer)
    if settings is None and roles is None:
        chosen = for_device(chosen, options, list(model.parameters()), groups.world_size(group))
    return for_roles(chosen, roles)


def resolve_settings(settings: Settings | None, options: dict[str, Any], optimizer: Any) -> Settings:
    """Return the settings that were given in one of two ways, with what they leave open chosen by the optimizer."""
    if settings is not None and options:
        raise ValueError(f"give settings=... or single options ({', '.join(options)}), not both")
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r} is not a dkfac.Settings")
    known = set(Settings.__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise TypeError(f"KFAC has no option {unknown[0]!r}; {hint}it has {', '.join(sorted(known))}")
    has_rhythm = settings is not None or not options.keys().isdisjoint(ADAM.keys() - {"solver"})
    has_rhythm = has_rhythm or options.get("staleness", "fixed") != "fixed" or bool(options.get("inverse_lag", 0))
    settings = Settings(**options) if settings is None else settings
    fits = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and settings.solver != "cholesky"
    fits = fits and settings.rescale in ("auto", "none", "kl-clip")
    fits = fits and not any(group.get("amsgrad") for group in optimizer.param_groups)
    if settings.curvature == "auto":
        settings = replace(settings, curvature="adam-eigen" if fits else "kfac")
    if settings.curvature != "adam-eigen" or has_rhythm or options.get("solver", "warm-eigen") != "warm-eigen":
        return settings
    return replace(settings, **ADAM)


def for_device(settings: Settings, options: dict[str, Any], parameters: list[Tensor], world_size: int) -> Settings:
    """Return the settings with what makes steps fast on a GPU, if the model is on one: each that no option names.

    See docs/notes/004-gpu-speed.md. ``parameters``: the model's.
    """
    is_adam = settings.curvature == "adam-eigen"
    on_gpu = bool(parameters) and all(p.device.type == "cuda" for p in parameters)
    known = options.keys() <= PLAIN | SPEED and not callable(settings.damping)
    if not (on_gpu and known and settings.curvature in ("kfac", "adam-eigen")):
        return settings
    chosen: dict[str, Any] = {"solver": "warm-eigen" if is_adam else "cholesky", "tf32": True}
    if not is_adam and any(p.ndim == 2 and p.shape[1] >= settings.max_dim for p in parameters):
        del chosen["solver"]  # a layer on a flattened map may be among them, which needs eigenvalues
    if world_size == 1:
        chosen |= {"spread_refresh": settings.inverse_interval}
        can_capture = is_adam or settings.rescale != "kl-clip"
        chosen |= {"cuda_graph": can_capture and sum(p.numel() for p in parameters) <= GRAPH_ELEMENTS}
    return replace(settings, **{name: value for name, value in chosen.items() if name not in options})


def for_roles(settings: Settings, roles: Any) -> Settings:
    """Return the settings of gradient workers, who precondition and leave the rest to helpers."""
    if roles is None:
        return settings
    if roles.role != "gradient":
        raise ValueError(f"this rank is a {roles.role} worker: call roles.serve(...) instead of attaching K-FAC")
    if roles.closed:
        raise ValueError("these roles have ended with the K-FAC they were given to: call dkfac.roles again")
    kind = (
        settings.share == "weights"
        or settings.curvature == "ekfac"
        or settings.fisher != "empirical"
        or settings.split_dim is not None
        or settings.staleness != "fixed"
    )
    if kind or settings.strategy not in ("auto", "replicated") or settings.spread_refresh > 1:
        raise ValueError(
            'roles go with curvature="kfac" or "adam-eigen", fisher="empirical", share="gradients", staleness="fixed" '
            "and whole factors, and need no strategy or spread_refresh: helpers measure and decompose"
        )
    return replace(settings, strategy="replicated", cluster=None)
