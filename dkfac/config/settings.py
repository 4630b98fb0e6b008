"""The settings of K-FAC: one frozen, validated definition for API, command line, files and docs.

Each field is declared with its row (:mod:`dkfac.config.row`). What does not go together is in
:mod:`dkfac.config.restrictions`.
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
    """Return options as the frozen object holds them: the one place where a value is replaced by another."""
    found = row.converted(settings, move_old_keywords(options))
    if found.get("curvature") in OWN_STEPS and found.get("rescale", "auto") == "auto":
        found["rescale"] = "none"
    return found


@row.prepared_by(prepare)
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Meaning):
    # fmt: off
    damping: Scheduled = row.numeric(
        3e-4, "step", "Added to the spectrum before inversion; same unit as the curvature of the loss.",
        _INDEFINITE, low=0, schedule=True)
    damping_mode: DampingMode = row.choice(
        "absolute", DampingMode, "step",
        '`"relative"`: times the mean eigenvalue of the layer, unless that is rounding, so that it survives another '
        "loss scale.",
        "it decides the unit of damping")
    factor_decay: Scheduled = row.numeric(
        0.95, "statistics", "Weight of the old running factor at each factor update; 0 keeps only the newest batch.",
        "at 1 the first batch would never be forgotten and no later one averaged in",
        low=0, high=1, schedule=True)
    factor_interval: int = row.integer(
        10, 1, "statistics", "Steps between measurements of the factors.", "it counts optimizer steps")
    inverse_interval: int = row.integer(
        100, 1, "decomposition", "Steps between decompositions; a multiple of `factor_interval`.",
        "it counts optimizer steps")
    warmup_refresh: float | tuple[int, int] | None = row.other(
        1.3, "decomposition",
        "Early curvature changes fast. A number: each refresh comes at that many times the step of the one before (0, "
        "1, 2, ... 7, 9, 11, 14, ...), until they are `inverse_interval` apart. `(every, until)`: every so many steps "
        "before step `until`. Factors are measured in the same proportion as later. None: the same intervals from the "
        "start.",
        "early steps use it as a rhythm", optional=True, accepts=convert.is_rhythm, convert=convert.as_rhythm,
        words="a number >= 1.01, (every, until), integers >= 1, or None")
    rescale: Rescale = row.choice(
        "auto", Rescale, "step",
        'Length of the preconditioned gradient: that of the raw gradient per layer (`"norm"`), over all layers '
        '(`"norm-global"`), the latter but held back by `kl_clip` (`"norm-kl"`), KL-clipped (`"kl-clip"`), or as it '
        'is (`"none"`). `"auto"`, with `curvature="kfac"`: `"norm-kl"` for torch.optim.SGD and absolute damping, '
        '`"norm-global"` for others.',
        "it decides the length of each update")
    kl_clip: Scheduled = row.numeric(
        1e-3, "step",
        "Bound on the change of the output distribution that a step predicts, in the unit of the loss; used by "
        '`rescale="norm-kl"` and `"kl-clip"`. With `curvature="adam-eigen"` a bound for each layer.',
        "at 0 every update would be zero", low=0, open_low=True, schedule=True)
    solver: Solver = row.choice(
        "eigen", Solver, "decomposition",
        '`"eigen"`: exact damping. `"cholesky"`: factored damping, cheaper. `"warm-eigen"`: improves the last basis. '
        'Where it is not named, KFAC chooses `"warm-eigen"` on a GPU and with Adam, and on a GPU with '
        '`curvature="kfac"` `"cholesky"`, except for what needs eigenvalues (scheduled damping, flattened maps).',
        "it decides how factors are inverted")
    curvature: Curvature = row.choice(
        "auto", Curvature, "step",
        '`"adaptive"`: the momentum over the root of the second moment of the gradient in the eigenbasis, damped as '
        "much as the following gradients ask for, with the length of the update of the optimizer. "
        '`"kfac"`: gradients divided by the factors. `"ekfac"`: eigenvalues replaced by second moments of the '
        'gradient in the eigenbasis. `"adam-eigen"`: the step of Adam or AdamW in the eigenbasis. `"auto"`: '
        '`"adaptive"` with an optimizer, unless `damping`, `damping_mode`, `norm_damping`, `rescale` or `kl_clip` is '
        'set, which it does not use, or the solver is `"cholesky"`; then `"adam-eigen"` with Adam, `"kfac"` with '
        "others. With Adam it has intervals of its own, if none are given to KFAC by name: every 5 steps until step "
        "500, every 20 later.",
        "it decides the eigenvalues in use")
    fisher: Fisher = row.choice(
        "empirical", Fisher, "statistics",
        'Whose gradients G is made of. `"sampled"`: of labels drawn from the prediction of the model, one extra '
        'backward on factor steps. `"exact"`: its mean, the Gauss-Newton matrix, one extra backward per model output. '
        "Both need `fisher_loss`, and do not change the training gradients.",
        "it decides which gradients G is made of")
    fisher_loss: FisherLoss | None = row.choice(
        None, FisherLoss, "statistics",
        "The loss that `fisher` is of: mean `cross-entropy` of logits; `bernoulli` (binary cross-entropy of logits) "
        "or `mse`, averaged over all outputs.",
        "it decides the Hessian that is propagated back", optional=True)
    fisher_fraction: float = row.numeric(
        1.0, "statistics",
        '`fisher="sampled"`: share of the examples, as 1/k, that labels are drawn for; others at each step.',
        "factors are measured on that share", low=0, open_low=True, high=1, open_high=False)
    weight_sharing: WeightSharing = row.choice(
        "expand", WeightSharing, "statistics",
        "Positions (pixels, tokens) as rows of their own, or averaged (input) and summed (gradient) per example.",
        "it decides how positions enter the factors")
    loss_terms: LossTerms | int = row.choice(
        "batch", LossTerms, "statistics",
        "How many terms the loss is a mean of: examples, positions, or a number per backward pass.",
        "the scale of G, and so the meaning of damping, depends on it", low=1)
    accumulate: Accumulate | None = row.choice(
        None, Accumulate, "statistics",
        'How micro-batch losses were combined: divided by their number (`"mean"`, assumed when None), not divided '
        '(`"sum"`), or summed over all terms of the step and divided by their number (`"terms"`).',
        "the scale of G depends on how micro-batch losses were combined", optional=True)
    batch_dim: int = row.integer(
        0, 0, "statistics", "Dimension of the examples in the first input of the model.",
        "it is a dimension of the model's first input, counted from the front")
    statistics_fraction: float = row.numeric(
        1.0, "statistics",
        "Share of positions (tokens) or, for convolutions, examples that factors are measured on, as 1/k; another "
        "part at each step. Layers that see an example once use all.",
        "factors are measured on that share", low=0, open_low=True, high=1, open_high=False)
    spread_refresh: int = row.integer(
        1, 1, "decomposition",
        "One process: carry out a refresh over this many steps, some layers at each, instead of all in one. With "
        'solvers `"cholesky"` and `"warm-eigen"` a new decomposition is used from the next step on, so that a GPU can '
        "work on it beside that step.",
        _STEPS)
    inverse_lag: int = row.integer(
        0, 0, "decomposition",
        "Decompositions of the factors of a step are computed beside the steps that follow, and used this many steps "
        "later, on all ranks; the first one of a layer at once. At most the shortest interval between refreshes.",
        _STEPS)
    tf32: bool = row.flag(
        False, "step",
        "On a GPU, multiply the float32 matrices of factors and of preconditioning, not of decompositions, as TF32: "
        'four times as fast. Not for `report()["delicate_layers"]`, whose gradients TF32 would spoil because of '
        'little damping. For all layers with `curvature="adam-eigen"`, where directions of little curvature are '
        "noise, as with bfloat16. KFAC chooses it on a GPU, where it is not named, except for EKFAC and "
        "`inverse_lag`.")
    cuda_graph: bool = row.flag(
        False, "step",
        "One process on a GPU: replay the arithmetic of ordinary steps from a CUDA graph, which saves launches and "
        "takes up to three times the memory of the gradients. KFAC chooses it, where it is not named, up to 268 "
        'million parameters, if steps are alike: no schedule of damping, no `staleness`, `solver="eigen"` or KL '
        "clip.")
    norm_form: NormForm = row.choice(
        "off", NormForm, "statistics",
        'Curvature of norm layers: 2x2 per channel (`"unit"`), or left to the optimizer (`"off"`).',
        "it decides the curvature of norm layers",
        words="; experimental={'norm_form': ...} takes 'full' and 'diagonal'")
    norm_damping: Scheduled | None = row.numeric(
        None, "step", "Damping of norm layers; None: `damping`.", _INDEFINITE,
        low=0, schedule=True, optional=True)
    max_dim: int = row.integer(
        8192, 1, "statistics",
        "A factor larger than this is not formed: the layer is left to the optimizer and named.",
        "no factor could be formed")
    flattened: Flattened = row.choice(
        "auto", Flattened, "statistics",
        "Linear layers on flattened maps whose A is taken to be a product of channels and positions. "
        '`"auto"`: those whose A is larger than `max_dim`, with the channels of the convolution before. Not with '
        '`solver="cholesky"`.',
        "A is factored by channels and positions",
        words="; experimental={'flattened': {...}} takes a mapping from layers to channels")
    block_dim: int | None = row.integer(
        256, 1, "statistics",
        "A factor larger than this is kept as equal diagonal blocks, none larger; what is between them is neither "
        "measured nor used. Time, memory and transfers become a fraction. None keeps factors whole, as the papers do.",
        "it is the size of a matrix; None keeps factors whole", optional=True)
    skip: tuple[str, ...] = row.other(
        (), "general", "Layers left to the optimizer: names, or patterns with `*` and `?`.",
        "layers are left out by name", accepts=convert.are_names, convert=convert.as_tuple,
        words="a list of layer names or patterns")
    max_failures: int = row.integer(
        10, 1, "decomposition", "Failed decompositions of one factor in a row after which the run raises.",
        "it counts failed decompositions in a row")
    announce: bool = row.flag(True, "general", "Print one line that says what was attached.")
    strategy: Strategy = row.choice(
        "auto", Strategy, "distribution",
        "Who holds, decomposes and preconditions what under torch.distributed. Results do not depend on it, except "
        'that under `"local"` the owner of a layer measures on its own batches alone.',
        "it decides which rank does what")
    cluster: str | None = row.other(
        None, "distribution",
        '`strategy="auto"`: what links and work cost, as a file of `dkfac measure` or the name of a preset; None: '
        "guesses, and fewer strategies to choose from.",
        "", optional=True, accepts=lambda value: isinstance(value, str),
        words="the name of a file of `dkfac measure`, or of a preset")
    worker_fraction: float | None = row.numeric(
        None, "distribution",
        '`strategy="hybrid-opt"`: the share of the ranks that hold the decompositions of a layer; None: half.',
        "it is a share of the ranks", low=0, open_low=True, high=1, open_high=False, optional=True)
    wire_dtype: WireDtype | None = row.choice(
        None, WireDtype, "distribution",
        "Precision of factors and preconditioned gradients on the network; None: their own.",
        "factors travel in it", optional=True, convert=convert.dtype_name)
    share: Share = row.choice(
        "gradients", Share, "distribution",
        "What the owner of a layer sends: the preconditioned gradient, or the updated weights after it alone has "
        "stepped.",
        "it decides what the owner of a layer sends")
    experimental: ExperimentalSettings = row.other(
        ExperimentalSettings(), "experimental",
        "Settings that the studies of this project could not show to pay: a dict of them, or one object.",
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
        """Return the step from which on the rhythm is that of the two intervals."""
        early = self.warmup_refresh
        if isinstance(early, tuple):
            return early[1] if early[0] < self.inverse_interval else 0
        return 0 if early is None else intervals.early_refreshes(early, self.inverse_interval, self.inverse_lag)[1]

    @property
    def shortest_interval(self) -> int:
        """Return the least number of steps between two refreshes."""
        steps = [n for n in range(self.early_steps + 2 * self.inverse_interval + 1) if self.rhythm(n)[1]]
        return min(b - a for a, b in itertools.pairwise(steps))

    def refresh_steps(self, step: int) -> tuple[list[int], int]:
        """Return the steps that carry out the refresh that was due last, a slice each, and when the next is due."""
        return intervals.slices(step, self.rhythm, self.spread_refresh)

    def at(self, name: str, step: int) -> float:
        """Return a scheduled setting's value at a step, checked as the constant is."""
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
        """Return the settings as plain values; a schedule shows as ``"<function>"``."""
        return row.plain_values(self)
