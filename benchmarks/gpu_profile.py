"""Where does the time of a step with K-FAC go? Ordinary, factor and refresh steps of one case, by stage and by kernel.

It is not called ``profile.py``, because scripts in this folder import each other by name, and it would shadow the
standard library's module of that name (``cProfile``, which torch uses, imports it).

There are two passes over the same kinds of steps. The first runs without a profiler and synchronizes after each step:
it has the seconds by stage of ``kfac.report()`` and the host time in each of K-FAC's hooks. The second runs under
``torch.profiler``, which slows the host down: it has kernels, launches and synchronizations by the part of K-FAC that
caused them, and a Chrome trace of one step of each kind. ``plain`` steps are those of the model before K-FAC is
attached.
"""

import argparse
import contextlib
import functools
import gzip
import json
import pathlib
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict

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
    wait,
)
from torch.profiler import ProfilerActivity, profile, record_function

WATCHED = [
    ("dkfac.capture.hooks", "ModelHook", "__call__", "hook: model forward"),
    ("dkfac.capture.hooks", "LayerHook", "__call__", "hook: layer forward"),
    ("dkfac.capture.collector", "Collector", "record", "hook: layer backward"),
    ("dkfac.runtime.optimizer_hooks", "OptimizerHooks", "_before", "hook: optimizer step"),
]
"""Where K-FAC is entered from the training loop: nothing of it runs outside these."""

TOP = 25
SPENT: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
"""Calls and seconds of the host by hook, since last emptied."""
PROFILING = [False]


@contextlib.contextmanager
def span(label: str):
    begin = time.perf_counter()
    try:
        with record_function(f"kfac {label}") if PROFILING[0] else contextlib.nullcontext():
            yield
    finally:
        entry = SPENT[label]
        entry[0], entry[1] = entry[0] + 1, entry[1] + time.perf_counter() - begin


def watch_kfac() -> list[str]:
    """Note every entry into K-FAC and each of its stages; returns what this dkfac does not have."""
    missing = []

    def wrap(owner, method: str, label: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            with span(label):
                return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    for module, owner, method, label in WATCHED:
        found = getattr(__import__(module, fromlist=[owner]), owner, None)
        if hasattr(found, method):
            wrap(found, method, label)
        else:
            missing.append(f"{module}.{owner}.{method}")
    from dkfac.capture.timing import StageTimer

    stage = StageTimer.stage

    @contextlib.contextmanager
    def watched(self, name: str, device: torch.device):
        with span(f"stage: {name}"), stage(self, name, device):
            yield

    StageTimer.stage = watched
    return missing


def stages_of(training: Training) -> dict[str, float]:
    return training.kfac.report()["stage_seconds"] if training.kfac else {}


def time_step(training: Training) -> dict:
    """Take a step and wait for it: milliseconds of the host and in all, of stages and hooks."""
    before = stages_of(training)
    wait(training.device)
    SPENT.clear()
    begin = time.perf_counter()
    training.step()
    host = time.perf_counter()
    wait(training.device)
    end = time.perf_counter()
    spent = {label: {"calls": calls, "host_ms": seconds * 1e3} for label, (calls, seconds) in SPENT.items()}
    stages = {key: 1e3 * (value - before.get(key, 0.0)) for key, value in stages_of(training).items()}
    hooks = sum(entry["host_ms"] for label, entry in spent.items() if label.startswith("hook"))
    times = {"host_ms": (host - begin) * 1e3, "total_ms": (end - begin) * 1e3, "hooks_host_ms": hooks}
    return {**times, "stage_ms": {k: v for k, v in stages.items() if v}, "spans": spent}


def profile_step(training: Training, trace: pathlib.Path) -> dict:
    """Take a step under the profiler, keep its trace and return what happened in it."""
    activities = [ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    wait(training.device)
    PROFILING[0] = True
    with profile(activities=activities) as profiler:
        training.step()
        wait(training.device)
    PROFILING[0] = False
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    return digest(events)


def digest(events: list[dict]) -> dict:
    """Return a step's kernels and calls of the driver, by name and by the part of K-FAC they were launched from."""
    by_kind = defaultdict(list)
    for event in events:
        by_kind[event.get("cat", "")].append(event)
    kernels = by_kind["kernel"] + by_kind["gpu_memcpy"] + by_kind["gpu_memset"]
    calls = by_kind["cuda_runtime"] + by_kind["cuda_driver"]
    spans = [e for e in by_kind["user_annotation"] if e["name"].startswith("kfac ")]
    place = {correlation(e): span_of(e, spans) for e in calls}
    wanted = re.compile("Launch|Memcpy|Memset|Synchronize")
    parts: dict[str, dict] = defaultdict(lambda: {"kernels": 0, "device_ms": 0.0, "launches": 0})
    for kernel in kernels:
        part = parts[place.get(correlation(kernel), "not attributed")]
        part["kernels"], part["device_ms"] = part["kernels"] + 1, part["device_ms"] + kernel["dur"] / 1e3
    for call in calls:
        parts[span_of(call, spans)]["launches"] += bool(re.search("Launch", call["name"]))
    shown = kernels or by_kind["cpu_op"]  # without a GPU: operations, whose times contain each other
    numbers, times = Counter(e["name"] for e in shown), Counter()
    for event in shown:
        times[event["name"]] += event["dur"] / 1e3
    return {
        "kernels": len(kernels),
        "device_ms": sum(e["dur"] for e in kernels) / 1e3,
        "launches": sum(part["launches"] for part in parts.values()),
        "cpu_ops": len(by_kind["cpu_op"]),
        "calls": dict(Counter(e["name"] for e in calls if wanted.search(e["name"]))),
        "by_part": dict(sorted(parts.items(), key=lambda item: -item[1]["device_ms"])),
        "top": [{"name": n, "number": numbers[n], "ms": ms} for n, ms in times.most_common(TOP)],
        "top_are": "kernels" if kernels else "cpu_ops",
    }


def correlation(event: dict) -> int | None:
    """Return the number that a kernel and the call that launched it have in common."""
    return event.get("args", {}).get("correlation")


def span_of(event: dict, spans: list[dict]) -> str:
    """Return the innermost part of K-FAC that an event of the host lies in."""
    around = [
        s for s in spans if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
    ]  # a backward pass has a thread of its own
    return min(around, key=lambda s: s["dur"])["name"] if around else "training loop"


def mean_of(entries: list[dict]) -> dict:
    """Return the mean of equally built figures, missing ones counting as 0."""
    keys = dict.fromkeys(key for entry in entries for key in entry)
    result = {}
    for key in keys:
        values = [entry[key] for entry in entries if key in entry]
        whole = isinstance(values[0], dict)
        result[key] = mean_of([*values, *[{}] * (len(entries) - len(values))]) if whole else sum(values) / len(entries)
    return result


def run(training: Training, options: dict | None, steps: int, args: argparse.Namespace, label: str) -> dict:
    """Return the figures of each kind of step: ``plain`` without options, otherwise as K-FAC's rhythm has them."""
    timed, profiled = defaultdict(list), defaultdict(list)

    def kind() -> str:
        return "plain" if options is None else kind_of(options, training.steps)

    for _ in range(steps):
        timed[kind()].append(time_step(training))
    with tempfile.TemporaryDirectory() as folder:
        while any(len(profiled[name]) < min(args.repeat, len(timed[name])) for name in timed):
            name = kind()
            if len(profiled[name]) >= args.repeat:
                training.step()
                continue
            first = pathlib.Path(args.traces) / f"{label}_{name.replace('+', '_')}.json.gz"
            trace = pathlib.Path(folder) / "again.json.gz" if profiled[name] else first
            profiled[name].append(profile_step(training, trace))
    return {n: {"steps": len(timed[n]), "timed": mean_of(timed[n]), "profiled": profiled[n]} for n in timed}


def show(kinds: dict) -> None:
    for kind, entry in kinds.items():
        timed, seen = entry["timed"], entry["profiled"][-1]
        print(
            f"\n{kind}: {timed['total_ms']:.2f} ms, of which the host {timed['host_ms']:.2f} and in K-FAC's hooks "
            f"{timed['hooks_host_ms']:.2f}; {seen['kernels']} kernels in {seen['device_ms']:.2f} ms, "
            f"{seen['launches']} launches, {seen['cpu_ops']} operations"
        )
        print("  stages (report):", ", ".join(f"{k} {v:.3f} ms" for k, v in timed["stage_ms"].items()) or "none")
        for label, part in timed["spans"].items():
            print(f"  host, {label}: {part['host_ms']:.3f} ms in {part['calls']:g} calls")
        for label, part in seen["by_part"].items():
            print(f"  device, from {label}: {part['device_ms']:.3f} ms in {part['kernels']} kernels")
        print("  calls:", ", ".join(f"{name} {number}" for name, number in seen["calls"].items()) or "none")
        print(f"  longest {seen['top_are']}:")
        for row in seen["top"]:
            print(f"    {row['ms']:9.3f} ms {row['number']:5d} x {row['name'][:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = add_common(parser)
    add("--case", default="resnet50:10/100", help=f"one of {', '.join(CASES)}, with :factor/inverse interval")
    add("--variant", choices=list(FRACTIONS), default="full")
    add("--repeat", type=int, default=2, help="profiled steps of each kind; the last one is shown, all are written")
    add("--traces", help="folder for the Chrome traces; by default that of the results")
    add("--out")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    out = pathlib.Path(args.out or default_out("gpu_profile.json", args))
    args.traces = args.traces or str(out.parent)
    name, interval = parse_case(args.case)[0]
    missing = watch_kfac()
    if missing:
        print(f"not in this dkfac, so not watched: {', '.join(missing)}", file=sys.stderr)
    case, label = CASES[name], f"gpu_profile_{name}_{interval[0]}_{interval[1]}_{args.variant}"
    torch.manual_seed(0)
    training = Training(case, case.build(args.tiny), make_batch(case, args), args)
    training.block(3 if args.tiny else 10)
    with tempfile.TemporaryDirectory() as folder:  # the first start of a profiler takes long and is not representative
        profile_step(training, pathlib.Path(folder) / "first.json.gz")
    kinds = run(training, None, 3 if args.tiny else 10, args, label)
    free()
    options = options_of(case, interval, args.variant, args)
    training.attach(options)
    training.steps = 0
    training.block(interval[1])
    kinds |= run(training, training.kfac.settings.describe(), interval[1], args, label)
    show(kinds)
    found = {"case": args.case, "variant": args.variant, "tiny": args.tiny, "mode": "eager", **switches()}
    write(out, {**found, "settings": training.kfac.settings.describe(), "not_watched": missing, "kinds": kinds})
    print(f"traces: {args.traces}/{label}_*.json.gz", file=sys.stderr)


if __name__ == "__main__":
    main()
