"""What does the one line cost? ``dkfac.KFAC(model, optimizer)`` with nothing else set, first steps included.

Each case is trained by the optimizer alone and by the same optimizer with K-FAC, in blocks of steps that take turns, on
one random batch: the benchmark measures step time, not learning. Reported, relative to the optimizer alone in the same
blocks: the mean of the first ``--first`` steps (with and without those listed apart), the mean of ``--later`` steps
after the frequent refreshes of early training (the run goes on as if resumed at their end), and K-FAC's longest step
relative to its median one, without step 0 and without steps that captured a CUDA graph, which are listed apart, and
without the first step of each block, before which the device was idle, so that it waits for the host. Seconds that
Python's garbage collector took in a step are listed too. Extra memory is the peak of a run with K-FAC less that of a
run without it, each alone on the device. The run with K-FAC for its peak comes first, so kernels are compiled by then:
Triton keeps them on disk.

``--path ranks`` takes the path of several ranks: a process group of one rank, NCCL on a GPU, that sends to itself what
ranks send to each other.

``--device cpu --tiny`` is a smoke test of the script: small models, few steps, meaningless figures.
"""

import argparse
import gc
import math
import os
import statistics
import sys
import time
import traceback
from dataclasses import replace
from itertools import pairwise

import torch
from environment import write
from gpu_cases import CASES, Case, Training, default_out, free, make_batch, switches, tiny_resnet
from torch import nn

BLOCK = 12
"""Steps of an arm before the other one takes its turn. Refreshes are rarely the first of a block."""


def torchvision_model(name: str, *, cifar: bool = False):
    def build(tiny: bool) -> nn.Module:
        if tiny:
            return tiny_resnet()
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=10 if cifar else 1000)
        if cifar:  # as the CIFAR literature has it: no stride and no pooling at the beginning
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        return model

    return build


IMAGES = {"shape": (128, 3, 224, 224), "tiny_shape": (4, 3, 16, 16), "classes": 1000, "channels_last": True}
LINES: dict[str, Case] = {
    "ResNet-50, SGD": replace(CASES["resnet50"], kfac={}),
    "ResNet-18 on CIFAR, SGD": Case(
        build=torchvision_model("resnet18", cifar=True), shape=(128, 3, 32, 32), tiny_shape=(4, 3, 8, 8), classes=10,
        channels_last=True,
    ),
    "ResNet-50, AdamW": replace(CASES["resnet50"], kfac={}, adamw=True),
    "ConvNeXt-T, AdamW": Case(build=torchvision_model("convnext_tiny"), adamw=True, **IMAGES),
    "ViT-B/16, AdamW": Case(build=torchvision_model("vit_b_16"), adamw=True, **(IMAGES | {"channels_last": False})),
    "GPT-2 small, AdamW": replace(CASES["gpt2"], kfac={"loss_terms": "token"}),
}  # fmt: skip


class Captures:
    """Counts CUDA graphs captured so far: a step that captures one is reported apart."""

    def __init__(self) -> None:
        self.count, begin = 0, torch.cuda.CUDAGraph.capture_begin

        def counted(graph: torch.cuda.CUDAGraph, *args, **kwargs) -> None:
            self.count += 1
            begin(graph, *args, **kwargs)

        torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]


class Collections:
    """Seconds that Python's garbage collector has taken so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict) -> None:
        self.seconds += time.perf_counter() * (1 if phase == "stop" else -1)


def attached(case: Case, template: nn.Module, batch, args: argparse.Namespace) -> Training:
    training = Training(case, template, batch, args)
    training.attach({"announce": False, **case.kfac})
    return training


def extra_memory(case: Case, template: nn.Module, batch, args: argparse.Namespace) -> int | None:
    """Return the bytes that K-FAC adds to the peak; None without a GPU."""
    if torch.device(args.device).type != "cuda":
        return None
    peaks = []
    for make in (Training, attached):
        free()
        training = make(case, template, batch, args)
        training.block(3 if make is Training else args.memory_steps)
        peaks.append(torch.cuda.max_memory_allocated())
        if training.kfac is not None:
            training.kfac.close()
        del training
    free()
    return peaks[1] - peaks[0]


def mean_of(times: list[float], here: slice, apart: dict[int, float]) -> float:
    return statistics.fmean(t for i, t in enumerate(times[here]) if i not in apart)


def run_case(name: str, args: argparse.Namespace, captures: Captures, collections: Collections) -> dict:
    case = LINES[name]
    torch.manual_seed(0)
    template, batch = case.build(args.tiny), make_batch(case, args)
    extra = extra_memory(case, template, batch, args)
    plain, kfac = Training(case, template, batch, args), attached(case, template, batch, args)
    plain.block(3)  # allocator and library handles, before anything is compared
    alone: list[float] = []
    ours: list[float] = []
    captured: list[int] = []
    collected: list[float] = []
    step = kfac.step
    kfac.step = lambda: (step(), captured.append(captures.count), collected.append(collections.seconds))
    begin = args.first + args.settle
    later = slice(begin, begin + args.later)
    while len(ours) < later.stop:
        if len(ours) == args.first and kfac.kfac.settings.early_steps > args.first:
            kfac.kfac.load_state_dict(kfac.kfac.state_dict() | {"step": kfac.kfac.settings.early_steps})
        is_compared = len(ours) // BLOCK % args.alone_every == 0
        alone += plain.block(BLOCK)[0] if is_compared else [math.nan] * BLOCK
        ours += kfac.block(BLOCK)[0]
    apart = {i: t for i, t in enumerate(ours) if i == 0 or captured[i] > captured[i - 1]}
    first = slice(0, args.first)
    ordinary = [t for i, t in enumerate(ours) if i not in apart and i % BLOCK]
    compared = [t for t in alone if not math.isnan(t)]
    first_alone, later_alone = (
        statistics.fmean(t for t in alone[part] if not math.isnan(t)) for part in (first, later)
    )
    result = {
        "first_ratio": statistics.fmean(ours[first]) / first_alone,
        "first_ratio_without_apart": mean_of(ours, first, apart) / first_alone,
        "later_ratio": statistics.fmean(ours[later]) / later_alone,
        "longest_over_median": max(ordinary) / statistics.median(ordinary),
        "extra_bytes": extra,
        "alone_ms": statistics.median(compared),
        "alone_longest_over_median": max(compared) / statistics.median(compared),
        "kfac_median_ms": statistics.median(ordinary),
        "steps_apart_ms": apart,
        "collected_ms": {i: (b - a) * 1e3 for i, (a, b) in enumerate(pairwise(collected), 1) if b - a > 1e-3},
        "kfac_ms": ours,
        "settings": kfac.kfac.settings.describe(),
        "report_memory_bytes": kfac.kfac.report()["total_memory_bytes"],
    }
    kfac.kfac.close()
    memory = "" if extra is None else f", extra memory {extra / 1e9:.2f} GB"
    print(
        f"{name}: first {args.first} steps {result['first_ratio_without_apart']:.2f} "
          f"({result['first_ratio']:.2f} with {len(apart)} steps that capture graphs), later "
          f"{result['later_ratio']:.3f}, longest over median {result['longest_over_median']:.2f}{memory}", flush=True,
    )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tiny", action="store_true", help="small models and few steps, to try the script")
    add("--fused", action="store_true", help="fused optimizers, with and without K-FAC")
    add("--cases", help="separated by semicolons; default: all")
    add("--path", choices=("one", "ranks"), default="one")
    add("--first", type=int, default=300)
    add("--later", type=int, default=240)
    add("--settle", type=int, default=24, help="steps between the two, in which graphs are captured again")
    add("--alone-every", type=int, default=1, help="blocks with K-FAC for each without it")
    add("--memory-steps", type=int, default=60)
    add("--out")
    args = parser.parse_args()
    if args.path == "ranks":
        os.environ |= {"DKFAC_LOOPBACK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        backend = "nccl" if torch.device(args.device).type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    if args.tiny:
        args.first, args.later = min(args.first, 20), min(args.later, 20)
    chosen = list(LINES) if args.cases is None else [part.strip() for part in args.cases.split(";")]
    unknown = [name for name in chosen if name not in LINES]
    if unknown:
        sys.exit(f"no case {unknown[0]!r}; there are {'; '.join(LINES)}")
    captures, collections, found = Captures(), Collections(), {}
    for name in chosen:
        try:
            found[name] = run_case(name, args, captures, collections)
        except Exception:
            traceback.print_exc()
            found[name] = {"error": traceback.format_exc(limit=3)}
        free()
    device = torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else "cpu"
    write(args.out or default_out("one_line.json", args), {"device": device, **switches(), "cases": found})


if __name__ == "__main__":
    main()
