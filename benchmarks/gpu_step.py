"""What does a step with K-FAC cost on one GPU? Step times with and without it, in one run, in eager mode.

The reported ratio is K-FAC's mean step time over a whole number of inverse intervals (amortized), divided by the mean
step time of the same optimizer without K-FAC. The host's speed varies, so blocks of steps with and without K-FAC
alternate: each round is compared with the mean of the plain blocks before and after it, and the result is the median
over the rounds. Steps are timed with CUDA events at their start, without synchronization between steps. Memory, stages
and kinds of steps are from the first round, before the plain model is created.
A refresh that is not spread is one step in 100, which a 99th percentile just misses, so the longest step is reported
too. Inputs are random and created once on the device: the benchmark measures step time, not learning.

``--device cpu --tiny`` is a smoke test of the script: small models, few steps, meaningless figures.
"""

import argparse
import gc
import math
import statistics
import sys
import time
import traceback
from fnmatch import fnmatchcase

import torch
from environment import write
from gpu_cases import (
    CASES,
    FRACTIONS,
    Training,
    add_common,
    default_out,
    free,
    kind_of,
    make_batch,
    options_of,
    parse_case,
    switches,
)
from torch import Tensor

SUMMARY = ("steps", "mean_ms", "median_ms", "p99_ms", "max_ms", "p99_over_median", "wall_mean_ms")


def summary(times: list[float], wall: float) -> dict[str, float]:
    values = torch.tensor(times, dtype=torch.float64)
    median, p99 = (float(values.quantile(q)) for q in (0.5, 0.99))
    result = {"steps": len(times), "mean_ms": float(values.mean()), "median_ms": median, "p99_ms": p99}
    return result | {"max_ms": float(values.max()), "p99_over_median": p99 / median, "wall_mean_ms": wall}


def measure(training: Training, warmup: int, steps: int) -> dict:
    """Warm up, take timed steps and return the figures that every variant has."""
    training.block(warmup)
    cuda = training.device.type == "cuda"
    before = torch.cuda.max_memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    stages = training.kfac.report()["stage_seconds"] if training.kfac else {}
    first, pauses = training.steps, Pauses()
    with pauses:
        times, wall = training.block(steps)
    entry = summary(times, wall) | {"warmup_steps": warmup, "last_loss": float(training.loss.detach())}
    entry["peak_bytes"] = max(before, torch.cuda.max_memory_allocated()) if cuda else 0
    entry["collections"] = pauses.found
    entry["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() if cuda else 0
    entry["peak_measured_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
    training.loss = training.loss.detach()
    entry["resident_bytes"] = torch.cuda.memory_allocated() if cuda else 0
    if training.kfac is not None:
        entry |= figures_of(training, stages, times, first)
    return entry


class Pauses:
    """Python's garbage collections while it is entered: milliseconds of those that took one or more."""

    def __enter__(self) -> None:
        self.found: list[float] = []
        self._begin = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict) -> None:
        now = time.perf_counter()
        if phase == "stop" and now - self._begin >= 1e-3:
            self.found.append(1e3 * (now - self._begin))
        self._begin = now

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self)


def figures_of(training: Training, stages: dict, times: list[float], first: int) -> dict:
    """Return what only K-FAC has: stages, kinds of steps, memory and shares."""
    kfac, settings = training.kfac, training.kfac.settings.describe()
    report, kinds = kfac.report(), {}
    for i, milliseconds in enumerate(times):
        kinds.setdefault(kind_of(settings, first + i), []).append(milliseconds)
    spent = {key: 1e3 * (s - stages.get(key, 0.0)) / len(times) for key, s in report["stage_seconds"].items()}
    measured = {name for name, factors in kfac.factors().items() if factors}
    ours = {la.name: la.spec.grad_elements for la in kfac.layers if la.name in measured}
    every = {name: p.numel() for name, p in training.model.named_parameters()}
    inner = {name: n for name, n in every.items() if not is_end(name.rpartition(".")[0], training.case.ends)}
    ours_inner = {name: n for name, n in ours.items() if not is_end(name, training.case.ends)}
    square = sum(4 * f.num_elements for la in kfac.layers for f in la.spec.factors)
    return {
        "settings": settings,
        "stage_ms_per_step": spent,
        "mean_ms_by_kind": {kind: {"steps": len(v), "mean_ms": sum(v) / len(v)} for kind, v in kinds.items()},
        "counters": report["counters"],
        "delicate_layers": report["delicate_layers"],
        "layers": len(kfac.layers),
        "layers_never_measured": [la.name for la in kfac.layers if la.name not in measured],
        "share_preconditioned": sum(ours.values()) / sum(every.values()),
        "share_outside_head_and_embeddings": sum(ours_inner.values()) / sum(inner.values()),
        "square_copy_bytes": square,
        "report_memory_bytes": report["total_memory_bytes"],
        "square_copies_in_report": report["total_memory_bytes"] / square,
        "state_dict_tensors": by_form(kfac.state_dict()["layers"]),
    }


def is_end(name: str, ends: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ends)


def by_form(layers: dict) -> dict[str, dict[str, int]]:
    """Return number and bytes of the tensors in a state, by what they are, dtype and whether they are full squares.

    What the state holds; what memory holds is told by the allocator (``square_copies_resident``).
    """
    found: dict[str, dict[str, int]] = {}

    def walk(what: str, value) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(what or key, item)
        elif isinstance(value, Tensor):
            square = value.ndim > 1 and value.shape[-1] == value.shape[-2]
            key = f"{what} {str(value.dtype).removeprefix('torch.')}{' square' if square else ''}"
            entry = found.setdefault(key, {"tensors": 0, "bytes": 0})
            entry["tensors"], entry["bytes"] = entry["tensors"] + 1, entry["bytes"] + value.nbytes

    for state in layers.values():
        walk("", state)
    return found


def compare(entry: dict, rounds: list[dict], baselines: list[dict]) -> None:
    """Set a variant beside the plain blocks before and after each of its rounds.

    ``square_copies``: extra memory in units of all factors as full float32 squares; running factors and decompositions
    are two.
    """
    for i, found in enumerate(rounds):
        for key, name in (("mean_ms", "ratio"), ("median_ms", "ratio_of_medians"), ("wall_mean_ms", "ratio_of_wall")):
            found[name] = found[key] / statistics.mean(b[key] for b in baselines[i : i + 2])
    entry |= {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    entry["rounds"], entry["plain_ms"] = rounds, [b["mean_ms"] for b in baselines]
    for key in ("peak_bytes", "peak_measured_bytes", "peak_reserved_bytes", "resident_bytes"):
        entry[f"extra_{key}"] = entry[key] - baselines[0][key]
    entry["square_copies_resident"] = entry["extra_resident_bytes"] / entry["square_copy_bytes"]
    entry["square_copies_at_peak"] = entry["extra_peak_bytes"] / entry["square_copy_bytes"]


def run_case(name: str, interval: tuple[int, int], args: argparse.Namespace) -> dict:
    case, inverse = CASES[name], interval[1]
    torch.manual_seed(0)
    template, batch = case.build(args.tiny), make_batch(case, args)
    optimizer = "AdamW" if case.adamw else "SGD"
    result: dict = {"mode": "eager", "optimizer": optimizer, "fused": args.fused, "bf16_autocast": case.bf16}
    result |= {"shape": list(batch[0].shape), "channels_last": case.channels_last, "variants": {}}
    whole = inverse * math.ceil((1 if args.tiny else 100) / inverse)
    steps = args.steps or whole
    # The fourth refresh comes from graphs: one is careful, one compiles and one is captured.
    warmup = inverse if args.tiny else max(100, inverse * 7 // 2)
    if steps % inverse:
        print(f"{steps} steps are no whole number of inverse intervals: the ratio is not amortised", file=sys.stderr)

    def one(variant: str) -> dict:
        """Measure a variant, which then takes turns with a plain model."""
        free()
        few = 3 if args.tiny else 10
        plain, baselines = Training(case, template, batch, args), []
        baselines.append(measure(plain, few, args.baseline_steps))
        del plain
        free()
        training = Training(case, template, batch, args)
        training.attach(options_of(case, interval, variant, args))
        try:
            entry = measure(training, warmup, steps)
            rounds, plain = [{key: entry[key] for key in SUMMARY}], Training(case, template, batch, args)
            plain.block(few)
            baselines.append(summary(*plain.block(args.baseline_steps)))
            while len(rounds) < args.rounds:
                rounds.append(summary(*training.block(steps)))
                baselines.append(summary(*plain.block(args.baseline_steps)))
            compare(entry, rounds, baselines)
            return entry
        finally:
            training.kfac.close()

    label = f"{name} {interval[0]}/{inverse}"
    for variant in args.variants.split(","):
        try:
            entry = result["variants"][variant] = one(variant)
        except Exception as error:
            traceback.print_exc()
            result["variants"][variant] = {"error": f"{type(error).__name__}: {error}"}
            continue
        print(
            f"{label} {variant}: mean {entry['mean_ms']:.2f} ms, median {entry['median_ms']:.2f}, p99 "
            f"{entry['p99_ms']:.2f}, max {entry['max_ms']:.2f}; plain "
            + " ".join(f"{ms:.2f}" for ms in entry["plain_ms"])
            + f"; ratio {entry['ratio']:.3f} of "
            + " ".join(f"{found['ratio']:.3f}" for found in entry["rounds"])
            + f"; p99 / median {entry['p99_over_median']:.2f}; extra {entry['extra_peak_bytes'] / 1e9:.2f} GB at the "
            f"peak, {entry['extra_peak_reserved_bytes'] / 1e9:.2f} reserved, "
            f"{entry['extra_resident_bytes'] / 1e9:.2f} GB resident; stages "
            + ", ".join(f"{key} {value:.2f}" for key, value in entry["stage_ms_per_step"].items()),
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = add_common(parser)
    add("--cases", default=",".join(CASES), help="as in resnet50:10/100,resnet32")
    add("--variants", default=",".join(FRACTIONS))
    add("--steps", type=int, help="measured steps with K-FAC; by default 100")
    add("--baseline-steps", type=int, default=50)
    add("--rounds", type=int, default=3)
    add("--out")
    args = parser.parse_args()
    if unknown := set(args.variants.split(",")) - set(FRACTIONS):
        sys.exit(f"no variants {sorted(unknown)}; there are {', '.join(FRACTIONS)}")
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    begin, results = time.perf_counter(), {}
    for name, interval in [pair for text in args.cases.split(",") for pair in parse_case(text)]:
        label = f"{name}:{interval[0]}/{interval[1]}"
        try:
            results[label] = run_case(name, interval, args)
        except ImportError as error:
            print(f"skip {label}: {error}", flush=True)
            results[label] = {"skipped": str(error)}
        except Exception as error:
            traceback.print_exc()
            results[label] = {"error": f"{type(error).__name__}: {error}"}
        found = {"seconds": time.perf_counter() - begin, "tiny": args.tiny, **switches(), "cases": results}
        write(args.out or default_out("gpu_step.json", args), found)
    entries = [e for case in results.values() for e in (case, *case.get("variants", {}).values())]
    sys.exit(int(any("error" in entry for entry in entries)))


if __name__ == "__main__":
    main()
