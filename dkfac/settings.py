"""The settings of K-FAC: one frozen, validated definition for API, command line and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, get_args

from dkfac import rhythm
from dkfac.checks import INTEGERS, RANGES, bad, check_rhythm, check_together

Scheduled = float | Callable[[int], float]
"""A number, or a function from the step (counted from 0) to a number."""

DampingMode = Literal["absolute", "relative"]
Rescale = Literal["auto", "norm", "norm-global", "norm-kl", "kl-clip", "none"]
Solver = Literal["eigen", "cholesky", "warm-eigen"]
Curvature = Literal["auto", "adaptive", "kfac", "ekfac", "adam-eigen"]
BasisDtype = Literal["float32", "bfloat16"]
Fisher = Literal["empirical", "exact", "sampled"]
WeightSharing = Literal["expand", "reduce"]
LossTerms = Literal["batch", "token"]
Accumulate = Literal["mean", "sum", "terms"]
NormForm = Literal["unit", "full", "diagonal", "off"]
FisherLoss = Literal["cross-entropy", "bernoulli", "mse"]
Strategy = Literal[
    "auto", "comm-opt", "sharded", "local", "replicated", "layer-wise", "factor-wise", "hybrid-opt", "mem-opt", "spd"
]
WireDtype = Literal["float32", "bfloat16", "float16"]
WireForm = Literal["sums", "rows"]
Share = Literal["gradients", "weights"]
Fusion = Literal["one", "optimal", "spd"]
InverseBackend = Literal["auto", "stream", "threads", "inline"]
Staleness = Literal["fixed", "change", "basis"]


SCHEDULES = ("damping", "norm_damping", "factor_decay", "kl_clip")
"""Settings that may be functions of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    damping: Scheduled = 3e-4
    """Added to the spectrum before inversion; same unit as the curvature of the loss."""

    damping_mode: DampingMode = "absolute"
    """``"relative"``: times the layer's mean eigenvalue, unless that is rounding, so it survives another loss scale."""

    factor_decay: Scheduled = 0.95
    """Weight of the old running factor at each factor update; 0 keeps only the newest batch."""

    factor_interval: int = 10
    """Steps between measurements of the factors."""

    inverse_interval: int = 100
    """Steps between decompositions; a multiple of ``factor_interval``."""

    warmup_refresh: float | tuple[int, int] | None = 1.3
    """Early curvature changes fast. A number: each refresh comes at so many times the step of the one before (0, 1, 2,
    ... 7, 9, 11, 14, ...), until they are ``inverse_interval`` apart. ``(every, until)``: every so many steps before
    step ``until``. Factors are measured in the same proportion as later. None: one rhythm from the start."""

    staleness: Staleness = "fixed"
    """``"change"``: each factor is measured and decomposed at intervals of its own, instead of the rhythm above, which
    grow while the batch factors of refreshes are alike and shrink when they are not. ``"basis"``: while the running
    factor is near diagonal in the last bases."""

    staleness_threshold: float = 0.1
    """Relative change up to which a factor counts as what it was."""

    staleness_min_rows: int = 1024
    """Rows that a refresh of a factor measures, over several steps if need be: a few rows are noise."""

    max_interval: int = 200
    """The longest that ``staleness`` lets a factor wait."""

    rescale: Rescale = "auto"
    """Length of the preconditioned gradient: the raw gradient's per layer (``"norm"``), over all layers, the latter but
    held back by ``kl_clip`` (``"norm-kl"``), KL-clipped, as it is. ``"auto"``, with ``curvature="kfac"``: ``"norm-kl"``
    for torch.optim.SGD and absolute damping, ``"norm-global"`` for others."""

    kl_clip: Scheduled = 1e-3
    """Bound on the change of the output distribution that a step predicts, in the unit of the loss; used by
    ``rescale="norm-kl"`` and ``"kl-clip"``. With ``curvature="adam-eigen"`` a bound for each layer."""

    solver: Solver = "eigen"
    """``"eigen"``: exact damping. ``"cholesky"``: factored damping, cheaper. ``"warm-eigen"``: last basis, improved.
    KFAC chooses, where it is not named, ``"warm-eigen"`` on a GPU and with Adam, and on a GPU with ``curvature="kfac"``
    ``"cholesky"`` (but for what needs eigenvalues: scheduled damping, flattened maps)."""

    curvature: Curvature = "auto"
    """``"adaptive"``: the momentum over the root of the gradient's second moment in the eigenbasis, damped as much as
    the following gradients ask for, with the length of the optimizer's own update. ``"kfac"``: gradients divided by the
    factors. ``"ekfac"``: eigenvalues replaced by second moments of the gradient in the eigenbasis. ``"adam-eigen"``:
    the step of Adam or AdamW in the eigenbasis. ``"auto"``: ``"adaptive"`` with an optimizer, unless ``damping``,
    ``damping_mode``, ``norm_damping``, ``rescale`` or ``kl_clip`` is set, which it does not use, or the solver is
    ``"cholesky"``; then ``"adam-eigen"`` with Adam, ``"kfac"`` with others. With Adam it has a rhythm of its own, if
    none is given to KFAC by name: every 5 steps until step 500, every 20 later."""

    basis_dtype: BasisDtype = "float32"
    """``"bfloat16"`` keeps eigenbases in half the memory, but for float64 models; not with ``curvature="kfac"``."""

    fisher: Fisher = "empirical"
    """Whose gradients G is made of. ``"sampled"``: of labels drawn from the model's own prediction, one extra backward
    on factor steps. ``"exact"``: its mean, the Gauss-Newton matrix, one extra backward per model output. Both need
    ``fisher_loss``, and leave the training gradients alone."""

    fisher_loss: FisherLoss | None = None
    """The loss that ``fisher`` is of: mean ``cross-entropy`` of logits; ``bernoulli`` (binary cross-entropy of logits)
    or ``mse``, averaged over all outputs."""

    fisher_fraction: float = 1.0
    """``fisher="sampled"``: share of the examples, as 1/k, that labels are drawn for; others at each step."""

    weight_sharing: WeightSharing = "expand"
    """Positions (pixels, tokens) as rows of their own, or averaged (input) and summed (gradient) per example."""

    loss_terms: LossTerms | int = "batch"
    """How many terms the loss is a mean of: examples, positions, or a number per backward pass."""

    accumulate: Accumulate | None = None
    """How micro-batch losses were combined: divided by their number (``"mean"``, assumed when None), not divided
    (``"sum"``), or summed over all the step's terms and divided by their number (``"terms"``)."""

    batch_dim: int = 0
    """Dimension of the examples in the model's first input."""

    spread_refresh: int = 1
    """One process: carry out a refresh over this many steps, some layers at each, instead of all in one. With solvers
    "cholesky" and "warm-eigen" a layer's new decomposition holds from the next step on, so that a GPU can work on it
    beside that step."""

    inverse_lag: int = 0
    """Decompositions of a step's factors are computed beside the steps that follow, and used from this many steps later
    on, on all ranks; a layer's first one at once. At most the shortest interval between refreshes."""

    inverse_backend: InverseBackend = "auto"
    """Where, with ``inverse_lag``: on a stream of their own, on CPU threads, or, to compare with, in the step itself.
    ``"auto"``: a stream on a GPU where nothing rounds its products to TF32, CPU threads elsewhere."""

    tf32: bool = False
    """On a GPU, multiply the float32 matrices of factors and of preconditioning, not of decompositions, as TF32: four
    times as fast. Not for ``report()["delicate_layers"]``, whose gradients it would spoil: little damping does that.
    For all with ``curvature="adam-eigen"``: directions of little curvature are noise there, as with bfloat16. KFAC
    chooses it on a GPU, where it is not named, but for EKFAC and ``inverse_lag``."""

    cuda_graph: bool = False
    """One process on a GPU: take the arithmetic of ordinary steps from a CUDA graph, which spares the host its launches
    and takes up to three times the memory of the gradients. KFAC chooses it, where it is not named, up to 268
    million parameters, if steps are alike: no schedule of damping, no ``staleness``, ``solver="eigen"``, KL clip."""

    statistics_fraction: float = 1.0
    """Share of positions (tokens) or, for convolutions, examples that factors are measured on, as 1/k; another part at
    each step. Layers that see an example once use all."""

    norm_form: NormForm = "off"
    """Curvature of norm layers: 2x2 per channel, all channels together, diagonal, or left to the optimizer."""

    norm_damping: Scheduled | None = None
    """Damping of norm layers; None: ``damping``."""

    max_dim: int = 8192
    """A factor larger than this is not formed: the layer is left to the optimizer and named."""

    flattened: Mapping[str, int] | Literal["auto", "off"] = "auto"
    """Linear layers on flattened maps whose A is taken to be a product of channels and positions, by name, with the
    number of channels. ``"auto"``: those whose A is larger than ``max_dim``, with the channels of the convolution
    before. Not with ``solver="cholesky"``."""

    split_dim: int | None = None
    """A factor larger than this is decomposed as diagonal blocks, equal and none larger; what is between them is left
    out. Time falls with the square of their number. An approximation: it changes results."""

    split_warmup: int = 0
    """Steps in which no factor is split."""

    skip: tuple[str, ...] = ()
    """Layers left to the optimizer: names, or patterns with ``*`` and ``?``."""

    max_failures: int = 10
    """Failed decompositions of one factor in a row after which the run raises."""

    announce: bool = True
    """Say in one line what was attached."""

    strategy: Strategy = "auto"
    """Who holds, decomposes and preconditions what under torch.distributed. Results do not depend on it, except that
    under ``"local"`` a layer's owner measures on its own batches alone."""

    cluster: str | None = None
    """``strategy="auto"``: what links and work cost, as a file of ``dkfac measure`` or a preset's name; None: guesses,
    and fewer strategies to choose from."""

    worker_fraction: float | None = None
    """``strategy="hybrid-opt"``: the share of the ranks that hold a layer's decompositions; None: half."""

    replicate_factors: bool = False
    """Keep running factors on every rank, as the papers do, instead of with who decomposes them."""

    wire_dtype: WireDtype | None = None
    """Precision of factors and preconditioned gradients on the network; None: their own."""

    wire_form: WireForm = "sums"
    """``"rows"``: where a rank's rows of a Linear layer are fewer than half a factor's dimension (small batches, wide
    layers), they travel instead of the sum of their products."""

    share: Share = "gradients"
    """What a layer's owner sends: the preconditioned gradient, or the updated weights after it alone has stepped."""

    overlap: bool = False
    """Reduce factors during forward and backward instead of after them; the numbers are the same."""

    fusion: Fusion | None = None
    """Which factors are reduced together: all, as soon as it pays, or by SPD-KFAC's rule. None: all, or, with
    ``overlap``, as soon as it pays."""

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and type(self.wire_dtype).__module__ == "torch":
            object.__setattr__(self, "wire_dtype", str(self.wire_dtype).removeprefix("torch."))
        for name, allowed, consequence in _CHOICES:
            value = getattr(self, name)
            options = get_args(allowed)
            if name == "loss_terms" and isinstance(value, int) and not isinstance(value, bool):
                if value < 1:
                    raise bad(name, value, "an integer >= 1", consequence)
            elif value is None and name in ("accumulate", "fisher_loss", "wire_dtype", "fusion"):
                continue
            elif not isinstance(value, str) or value not in options:
                text = ", ".join(repr(option) for option in options)
                extra = " or an integer >= 1" if name == "loss_terms" else ""
                raise bad(name, value, f"one of {text}{extra}", consequence)
        for name, low, high, low_open, consequence in RANGES:
            value = getattr(self, name)
            if callable(value) or (value is None and name == "norm_damping"):
                continue
            bound = f"a number {'>' if low_open else '>='} {low:g}"
            bound += f" and < {high:g}" if math.isfinite(high) else ""
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise bad(name, value, f"{bound}, or a function of the step", consequence)
            number = float(value)
            if number < low or (low_open and number == low) or number >= high:
                raise bad(name, value, f"{bound}, or a function of the step", consequence)
        for name, least, consequence in INTEGERS:
            value = getattr(self, name)
            if value is None and name == "split_dim":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise bad(name, value, f"an integer >= {least}", consequence)
        check_rhythm(self)
        for name in ("statistics_fraction", "fisher_fraction"):
            fraction: Any = getattr(self, name)
            if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < float(fraction) <= 1:
                raise bad(name, fraction, "a number > 0 and <= 1", "factors are measured on that share")
        is_list = isinstance(self.skip, Iterable) and not isinstance(self.skip, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in self.skip):
            raise bad("skip", self.skip, "a list of layer names or patterns", "layers are left out by name")
        object.__setattr__(self, "skip", tuple(self.skip))
        flattened: Any = self.flattened
        if flattened not in ("auto", "off") and not (
            isinstance(flattened, Mapping)
            and all(isinstance(k, str) and type(v) is int and v > 1 for k, v in flattened.items())
        ):
            allowed = "'auto', 'off' or a mapping from layers to channels, 2 or more"
            raise bad("flattened", flattened, allowed, "A is factored by channels and positions")
        for name in ("announce", "replicate_factors", "overlap", "tf32", "cuda_graph"):
            if not isinstance(getattr(self, name), bool):
                raise bad(name, getattr(self, name), "True or False", "")
        check_together(self)

    @property
    def takes_steps(self) -> bool:
        """Whether layers are stepped by K-FAC, not by the optimizer."""
        return self.curvature in ("adaptive", "adam-eigen")

    @property
    def measure_every(self) -> int:
        """Return k, where one row in k is measured."""
        return round(1 / self.statistics_fraction)

    def rhythm(self, step: int) -> tuple[bool, bool]:
        """Return whether this step measures factors and whether it decomposes them; step 0 does both."""
        later, early = (self.factor_interval, self.inverse_interval), self.warmup_refresh
        if early is None:
            return rhythm.plain(step, *later)
        if isinstance(early, tuple):
            return rhythm.denser(step, early, *later)
        return rhythm.growing(step, early, *later, self.inverse_lag)

    @property
    def early_steps(self) -> int:
        """Return the step from which on the rhythm is that of the two intervals."""
        early = self.warmup_refresh
        if isinstance(early, tuple):
            return early[1] if early[0] < self.inverse_interval else 0
        return 0 if early is None else rhythm.early_refreshes(early, self.inverse_interval, self.inverse_lag)[1]

    def refresh_steps(self, step: int) -> tuple[list[int], int]:
        """Return the steps that carry out the refresh that was due last, a slice each, and when the next is due."""
        return rhythm.slices(step, self.rhythm, self.spread_refresh)

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
        for field_name, low, high, low_open, consequence in RANGES:
            if field_name == name and not (low <= float(result) < high and not (low_open and result == low)):
                raise bad(f"{name}({step})", result, f"a number from {low:g} to {high:g}", consequence)
        return float(result)

    def describe(self) -> dict[str, str | int | float | bool | list[int] | list[str] | None]:
        """Return the settings as plain values; a schedule shows as ``"<function>"``."""
        plain: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            plain[field.name] = list(value) if isinstance(value, tuple) else value
            if isinstance(value, Mapping):
                plain[field.name] = [f"{key}={number}" for key, number in value.items()]
            if callable(value):
                plain[field.name] = "<function>"
        return plain


_CHOICES: tuple[tuple[str, Any, str], ...] = (
    ("damping_mode", DampingMode, "it decides the unit of damping"),
    ("rescale", Rescale, "it decides the length of each update"),
    ("solver", Solver, "it decides how factors are inverted"),
    ("curvature", Curvature, "it decides the eigenvalues in use"),
    ("basis_dtype", BasisDtype, "eigenbases are kept in it"),
    ("fisher", Fisher, "it decides which gradients G is made of"),
    ("fisher_loss", FisherLoss, "it decides the Hessian that is propagated back"),
    ("weight_sharing", WeightSharing, "it decides how positions enter the factors"),
    ("loss_terms", LossTerms, "the scale of G, and so the meaning of damping, depends on it"),
    ("accumulate", Accumulate, "the scale of G depends on how micro-batch losses were combined"),
    ("norm_form", NormForm, "it decides the curvature of norm layers"),
    ("strategy", Strategy, "it decides which rank does what"),
    ("wire_dtype", WireDtype, "factors travel in it"),
    ("wire_form", WireForm, "it decides what travels of a factor"),
    ("share", Share, "it decides what the owner of a layer sends"),
    ("inverse_backend", InverseBackend, "it decides where decompositions are computed"),
    ("staleness", Staleness, "it decides when statistics are refreshed"),
    ("fusion", Fusion, "it decides which factors are reduced together"),
)
