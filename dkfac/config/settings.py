"""The settings of K-FAC: one frozen, validated definition for the API, the command line, files and docs.

Input: options by name. Output: a frozen ``Settings``, or an error. Owns: nothing. Each field is declared with its row
(:mod:`dkfac.config.row`); :mod:`dkfac.config.restrictions` lists settings that cannot be combined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from dkfac.config import convert, intervals, restrictions, row
from dkfac.config.experimental import ExperimentalSettings, as_experimental, move_old_keywords
from dkfac.config.meaning import OWN_STEPS, Meaning

Scheduled = float | Callable[[int], float]
"""A number, or a function from the step (counted from 0) to a number."""

DampingMode = Literal["absolute", "relative"]
Rescale = Literal["auto", "norm", "norm-global", "norm-kl", "kl-clip", "none"]
Solver = Literal["eigen", "cholesky", "warm-eigen"]
Curvature = Literal["auto", "adaptive", "kfac", "ekfac", "adam-eigen"]
Fisher = Literal["empirical", "exact", "sampled"]
WeightSharing = Literal["expand", "reduce"]
LossTerms = Literal["batch", "token"]
Accumulate = Literal["mean", "sum", "terms"]
NormForm = Literal["unit", "off"]
Flattened = Literal["auto", "off"]
FisherLoss = Literal["cross-entropy", "bernoulli", "mse"]
Strategy = Literal[
    "auto", "comm-opt", "sharded", "local", "replicated", "layer-wise", "factor-wise", "hybrid-opt", "mem-opt", "spd"
]
WireDtype = Literal["float32", "bfloat16", "float16"]
Share = Literal["gradients", "weights"]

SCHEDULES = ("damping", "norm_damping", "factor_decay", "kl_clip")
"""Settings that may be functions of the step."""
_INDEFINITE = "negative damping makes the curvature indefinite"
_STEPS = "it counts steps"


def prepare(settings: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as they are stored. This is the only place where a given value is replaced by another."""
    found = row.converted(settings, move_old_keywords(options))
    if found.get("curvature") in OWN_STEPS and found.get("rescale", "auto") == "auto":
        found["rescale"] = "none"
    return found


@row.prepared_by(prepare)
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Meaning):
    # fmt: off
    damping: Scheduled = row.numeric(
        3e-4, "step", "Added to the eigenvalues before inversion, in the unit of the curvature of the loss.",
        _INDEFINITE, low=0, schedule=True)
    damping_mode: DampingMode = row.choice(
        "absolute", DampingMode, "step",
        '`"relative"`: damping is multiplied by the mean eigenvalue of the layer (unless that is rounding error), so '
        "it does not depend on the scale of the loss.",
        "it determines the unit of damping")
    factor_decay: Scheduled = row.numeric(
        0.95, "statistics", "Weight of the old running factor at each factor update; 0 keeps only the newest batch.",
        "at 1, all factors would keep the same weight and old ones would never be forgotten",
        low=0, high=1, schedule=True)
    factor_interval: int = row.integer(
        10, 1, "statistics", "Steps between measurements of the factors.", "it counts optimizer steps")
    inverse_interval: int = row.integer(
        100, 1, "decomposition", "Steps between decompositions; a multiple of `factor_interval`.",
        "it counts optimizer steps")
    warmup_refresh: float | tuple[int, int] | None = row.other(
        1.3, "decomposition",
        "More frequent refreshes in early training, when curvature changes fast. A number: the step of each refresh is "
        "that many times the step of the previous one (0, 1, 2, ... 7, 9, 11, 14, ...), until they are "
        "`inverse_interval` apart. `(every, until)`: every `every` steps before step `until`. Factors are measured in "
        "the same proportion as later. None: the same intervals from the start.",
        "it determines early refreshes", optional=True, accepts=convert.is_rhythm, convert=convert.as_rhythm,
        words="a number >= 1.01, (every, until), integers >= 1, or None")
    rescale: Rescale = row.choice(
        "auto", Rescale, "step",
        'Length of the preconditioned gradient: that of the raw gradient in each layer (`"norm"`) or over all layers '
        '(`"norm-global"`); the latter, but limited by `kl_clip` (`"norm-kl"`); KL-clipped (`"kl-clip"`); or '
        'unchanged (`"none"`). `"auto"`, with `curvature="kfac"`: `"norm-kl"` for torch.optim.SGD and absolute '
        'damping, `"norm-global"` otherwise.',
        "it determines the length of each update")
    kl_clip: Scheduled = row.numeric(
        1e-3, "step",
        "Upper bound on the predicted change of the output distribution in one step, in the unit of the loss; used by "
        '`rescale="norm-kl"` and `"kl-clip"`. With `curvature="adam-eigen"`, a bound for each layer.',
        "at 0 every update would be zero", low=0, open_low=True, schedule=True)
    solver: Solver = row.choice(
        "eigen", Solver, "decomposition",
        '`"eigen"`: exact damping. `"cholesky"`: factored damping, cheaper. `"warm-eigen"`: updates the last basis. If '
        'you do not set it, KFAC uses `"warm-eigen"` with its default intervals and on a GPU; there with '
        '`curvature="kfac"` `"cholesky"`, unless eigenvalues are needed (scheduled damping, flattened maps).',
        "it determines how factors are inverted")
    curvature: Curvature = row.choice(
        "auto", Curvature, "step",
        '`"adaptive"`: the momentum divided by the root of the second moment of the gradient in the eigenbasis. The '
        "following gradients determine its damping, and the update has the length of the optimizer's own. "
        '`"kfac"`: gradients multiplied by the inverse factors. `"ekfac"`: eigenvalues replaced by second moments of '
        'the gradient in the eigenbasis. `"adam-eigen"`: the step of Adam or AdamW in the eigenbasis. `"auto"`: '
        '`"adaptive"` with an optimizer, unless you set `damping`, `damping_mode`, `norm_damping`, `rescale` or '
        '`kl_clip`, which it does not use, or `solver="cholesky"`; then `"adam-eigen"` with Adam and `"kfac"` with '
        'other optimizers. With `"adaptive"` and `"adam-eigen"` the default intervals differ, unless you pass any to '
        "KFAC by name: every 5 steps until step 500, every 20 steps later.",
        "it determines the eigenvalues in use")
    fisher: Fisher = row.choice(
        "empirical", Fisher, "statistics",
        'The gradients that G is computed from. `"sampled"`: those of labels drawn from the prediction of the model, '
        'one extra backward on factor steps. `"exact"`: the expectation of that, the Gauss-Newton matrix, one extra '
        "backward per model output. Both need `fisher_loss` and do not change the training gradients.",
        "it determines which gradients G is computed from")
    fisher_loss: FisherLoss | None = row.choice(
        None, FisherLoss, "statistics",
        "The loss for `fisher`: mean `cross-entropy` of logits; `bernoulli` (binary cross-entropy of logits) or "
        "`mse`, averaged over all outputs.",
        "it determines the Hessian that is propagated back", optional=True)
    fisher_fraction: float = row.numeric(
        1.0, "statistics",
        '`fisher="sampled"`: fraction of the examples, as 1/k, that labels are drawn for; other ones at each step.',
        "factors are measured on that fraction", low=0, open_low=True, high=1, open_high=False)
    weight_sharing: WeightSharing = row.choice(
        "expand", WeightSharing, "statistics",
        '`"expand"`: positions (pixels, tokens) are rows. `"reduce"`: inputs are averaged, gradients summed over them.',
        "it determines how positions enter the factors")
    loss_terms: LossTerms | int = row.choice(
        "batch", LossTerms, "statistics",
        "The terms that the loss is a mean of: examples, positions, or a number of terms per backward pass.",
        "the scale of G, and so the meaning of damping, depends on it", low=1)
    accumulate: Accumulate | None = row.choice(
        None, Accumulate, "statistics",
        'How micro-batch losses are combined: divided by their number (`"mean"`, assumed if None), not divided '
        '(`"sum"`), or summed over all terms of the step and divided by their number (`"terms"`).',
        "the scale of G depends on how micro-batch losses are combined", optional=True)
    batch_dim: int = row.integer(
        0, 0, "statistics", "Dimension of the examples in the first input of the model.",
        "it is a dimension of the model's first input, counted from the front")
    statistics_fraction: float | None = row.numeric(
        1.0, "statistics",
        "Fraction of positions (tokens) or, for convolutions, of examples on which factors are measured, as 1/k; "
        "different ones at each step. Layers with one position per example use all. None: k is 2, 4 or 8 as long as a "
        "call keeps 32 rows for each feature of the widest factor and, for convolutions, 16 examples. If you do not "
        "set it, KFAC uses None on a GPU.",
        "factors are measured on that fraction", low=0, open_low=True, high=1, open_high=False, optional=True)
    spread_refresh: int = row.integer(
        1, 1, "decomposition",
        "Spread a refresh over this many steps, some layers at each, instead of one step. With the "
        'solvers `"cholesky"` and `"warm-eigen"`, a new decomposition is used from the next step on, so a GPU can '
        "compute it concurrently with that step.",
        _STEPS)
    inverse_lag: int = row.integer(
        0, 0, "decomposition",
        "Compute decompositions in the background and use them this many steps later, on all ranks. The first one of a "
        "layer is computed immediately. At most the shortest interval between refreshes.",
        _STEPS)
    tf32: bool = row.flag(
        False, "step",
        "On a GPU, use TF32 for the float32 matrix products of factors and preconditioning, but not of decompositions: "
        'four times as fast. Layers in `report()["delicate_layers"]` are excluded: their damping is so small that TF32 '
        'is not accurate enough. With `curvature="adam-eigen"` no layer is excluded: directions of small curvature '
        "are noise there, as with bfloat16. If you do not set it, KFAC uses it on a GPU, except with EKFAC and "
        "`inverse_lag`.")
    cuda_graph: bool = row.flag(
        False, "step",
        "On a GPU: replay the computation of ordinary steps from a CUDA graph, which saves kernel launches and takes "
        "up to three times the memory of the gradients. With several ranks: under strategies in which every rank "
        'preconditions every layer (`"comm-opt"`, `"replicated"`). If you do not set it, KFAC uses it there, '
        "for up to 268 million parameters, unless steps differ: scheduled damping, `staleness`, "
        '`solver="eigen"` or KL clipping.')
    norm_form: NormForm = row.choice(
        "off", NormForm, "statistics",
        'Curvature of norm layers: a 2x2 block per channel (`"unit"`), or left to the optimizer (`"off"`).',
        "it determines the curvature of norm layers",
        words="; experimental={'norm_form': ...} takes 'full' and 'diagonal'")
    norm_damping: Scheduled | None = row.numeric(
        None, "step", "Damping of norm layers; None: `damping`.", _INDEFINITE,
        low=0, schedule=True, optional=True)
    max_dim: int = row.integer(
        8192, 1, "statistics",
        "A layer with a larger factor is left to the optimizer, and listed in `print(kfac)`.",
        "no factor could be formed")
    flattened: Flattened = row.choice(
        "auto", Flattened, "statistics",
        "Approximate A of Linear layers on flattened feature maps by a Kronecker product over channels and positions. "
        '`"auto"`: for layers whose A exceeds `max_dim`, with the channels of the preceding convolution. Not with '
        '`solver="cholesky"`.',
        "A is factored by channels and positions",
        words="; experimental={'flattened': {...}} takes a mapping from layers to channels")
    block_dim: int | None = row.integer(
        256, 1, "statistics",
        "Keep a larger factor as equal diagonal blocks of at most this size. The elements between them are neither "
        "measured nor used, so time, memory and communication are a fraction. None: whole factors, as in the papers.",
        "it is the size of a matrix; None keeps factors whole", optional=True)
    skip: tuple[str, ...] = row.other(
        (), "general", "Layers left to the optimizer: names, or patterns with `*` and `?`.",
        "layers are left out by name", accepts=convert.are_names, convert=convert.as_tuple,
        words="a list of layer names or patterns")
    max_failures: int = row.integer(
        10, 1, "decomposition", "Consecutive failed decompositions of one factor after which an error is raised.",
        "it counts consecutive failed decompositions")
    announce: bool = row.flag(True, "general", "Print one line about the attached layers and settings.")
    strategy: Strategy = row.choice(
        "auto", Strategy, "distribution",
        "Which ranks store, decompose and precondition which layers under torch.distributed. Results do not depend on "
        'it, except under `"local"`, where the owner of a layer measures only its own batches.',
        "it determines which rank does what")
    cluster: str | None = row.other(
        None, "distribution",
        '`strategy="auto"`: the costs of links and computation, as a file written by `dkfac measure` or the name of a '
        "preset. None: estimated costs, and fewer strategies to choose from.",
        "", optional=True, accepts=lambda value: isinstance(value, str),
        words="the name of a file written by `dkfac measure`, or of a preset")
    worker_fraction: float | None = row.numeric(
        None, "distribution",
        '`strategy="hybrid-opt"`: the fraction of the ranks that store the decompositions of a layer; None: half.',
        "it is a fraction of the ranks", low=0, open_low=True, high=1, open_high=False, optional=True)
    wire_dtype: WireDtype | None = row.choice(
        None, WireDtype, "distribution",
        "Precision in which factors and preconditioned gradients are sent; None: their own.",
        "factors are sent in it", optional=True, convert=convert.dtype_name)
    share: Share = row.choice(
        "gradients", Share, "distribution",
        'What the owner of a layer sends: the preconditioned gradient, or, with `"weights"`, the weights that it alone '
        "has updated.",
        "it determines what the owner of a layer sends")
    patience: float | None = row.numeric(
        None, "distribution",
        "Seconds that ranks wait for one that does not arrive before an error on all of them says which rank it is and "
        "where it is. None: 80% of the process group's time-out.",
        "it counts seconds", low=0, open_low=True, optional=True)
    experimental: ExperimentalSettings = row.other(
        ExperimentalSettings(), "experimental",
        "Settings whose benefit this project's studies could not show: a dict of them, or one object.",
        "", accepts=lambda value: isinstance(value, ExperimentalSettings), convert=as_experimental,
        words="a dict of experimental settings, or ExperimentalSettings(...)")
    # fmt: on

    def __post_init__(self) -> None:
        row.check_rows(self)
        restrictions.check_combinations(self)

    def rhythm(self, step: int) -> tuple[bool, bool]:
        """Return whether this step measures factors and whether it decomposes them; step 0 does both."""
        later, early = (self.factor_interval, self.inverse_interval), self.warmup_refresh
        if early is None:
            return intervals.plain(step, *later)
        if isinstance(early, tuple):
            return intervals.denser(step, early, *later)
        return intervals.growing(step, early, *later, self.inverse_lag)

    @property
    def early_steps(self) -> int:
        """Return the first step from which on the two intervals apply."""
        early = self.warmup_refresh
        if isinstance(early, tuple):
            return early[1] if early[0] < self.inverse_interval else 0
        return 0 if early is None else intervals.early_refreshes(early, self.inverse_interval, self.inverse_lag)[1]

    @property
    def shortest_interval(self) -> int:
        """Return the smallest number of steps between two refreshes."""
        steps = [n for n in range(self.early_steps + 2 * self.inverse_interval + 1) if self.rhythm(n)[1]]
        return min(b - a for a, b in itertools.pairwise(steps))

    def refresh_steps(self, step: int) -> tuple[list[int], int]:
        """Return the steps over which the last refresh is spread, one slice each, and the step of the next refresh."""
        return intervals.slices(step, self.rhythm, self.spread_refresh)

    def at(self, name: str, step: int) -> float:
        """Return the value of a setting at a step. The result of a schedule is checked like a constant."""
        value = getattr(self, name)
        if value is None and name == "norm_damping":
            return self.at("damping", step)
        if not callable(value):
            return float(value)
        result = value(step)
        if isinstance(result, bool) or not isinstance(result, Real):
            raise TypeError(f"{name}({step}) returned {result!r}; a schedule returns a number, as float(...) does")
        own = row.rows_by_name(self)[name]
        if not own.contains(result):
            raise row.refusal(f"{name}({step})", result, f"a number from {own.low:g} to {own.high:g}", own.consequence)
        return float(result)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values; a schedule is shown as ``"<function>"``."""
        return row.plain_values(self)
