"""Shared parts of the GPU benchmarks: models with batches and optimizers, K-FAC's settings, steps and their kinds."""

import argparse
import ast
import contextlib
import copy
import gc
import itertools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from cifar import Block, resnet32
from torch import Tensor, nn

import dkfac

FRACTIONS = {"full": 1.0, "sampled": 0.25}
"""The share of rows that each variant measures factors on."""


@dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[bool], nn.Module]
    """The model; with True a tiny one."""
    shape: tuple[int, ...]
    tiny_shape: tuple[int, ...]
    classes: int
    by_token: bool = False
    bf16: bool = True
    channels_last: bool = False
    adamw: bool = False
    intervals: tuple[tuple[int, int], ...] = ((10, 100),)
    kfac: dict = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    """Patterns of the layers that are head or embedding."""


def tiny_resnet() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), Block(8, 8, 1), Block(8, 16, 2), *head)


def resnet50(tiny: bool) -> nn.Module:
    if tiny:
        return tiny_resnet()
    import torchvision

    return torchvision.models.resnet50(weights=None)


def vit_b(tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    small |= {"image_size": 16, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(num_labels=10 if tiny else 1000, **(small if tiny else {})))


def gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    small |= {"bos_token_id": None, "eos_token_id": None}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**off, **(small if tiny else {})))


GPT2_ENDS = ("lm_head", "transformer.wte", "transformer.wpe")
CASES = {
    "resnet50": Case(
        build=resnet50, shape=(128, 3, 224, 224), tiny_shape=(4, 3, 16, 16), classes=1000, channels_last=True,
        intervals=((10, 100), (1, 10)), ends=("fc", "5"),
    ),
    "resnet32": Case(
        build=lambda tiny: resnet32(), shape=(128, 3, 32, 32), tiny_shape=(4, 3, 8, 8), classes=10, bf16=False,
        channels_last=True, intervals=((1, 10),), ends=("20",),
    ),
    "vit_b": Case(
        build=vit_b, shape=(128, 3, 224, 224), tiny_shape=(4, 3, 16, 16), classes=1000,
        ends=("classifier", "*embeddings"),
    ),
    "gpt2": Case(  # the head is tied to the embedding and 50,257 wide; positions are counted as terms of the loss
        build=gpt2, shape=(8, 1024), tiny_shape=(2, 16), classes=50257, by_token=True, adamw=True, ends=GPT2_ENDS,
        kfac={"loss_terms": "token", "skip": GPT2_ENDS},
    ),
}  # fmt: skip


class Training:
    """A model of a case with its optimizer, its inputs and, if options are given, K-FAC."""

    def __init__(self, case: Case, template: nn.Module, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> None:
        self.case, self.batch, self.device, self.steps = case, batch, torch.device(args.device), 0
        self.model = copy.deepcopy(template).to(self.device).train()
        if case.channels_last:
            self.model.to(memory_format=torch.channels_last)
        fused = True if args.fused else None
        self.optimizer: torch.optim.Optimizer
        if case.adamw:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        self.kfac: dkfac.KFAC | None = None
        self.loss = torch.zeros(())

    def attach(self, options: dict) -> None:
        self.kfac = dkfac.KFAC(self.model, self.optimizer, **options)

    def step(self) -> None:
        inputs, labels = self.batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.bf16):
            output = self.model(inputs)
            logits = output if isinstance(output, Tensor) else output.logits
            self.loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        self.loss.backward()
        self.optimizer.step()
        self.steps += 1

    def block(self, steps: int) -> tuple[list[float], float]:
        """Take steps; returns the milliseconds of each, from start to start, and the wall time's mean."""
        wait(self.device)
        begin = time.perf_counter()
        marks = [mark(self.device)]
        for _ in range(steps):
            self.step()
            marks.append(mark(self.device))
        wait(self.device)
        wall = (time.perf_counter() - begin) * 1e3 / steps
        if self.device.type == "cuda":
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], wall
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)], wall


def mark(device: torch.device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def make_batch(case: Case, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(args.device).manual_seed(1)
    shape, classes = (case.tiny_shape, 10) if args.tiny else (case.shape, case.classes)
    kind = {"generator": generator, "device": args.device}
    if case.by_token:
        tokens = torch.randint(0, classes, (shape[0], shape[1] + 1), **kind)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(shape, **kind)
    images = images.to(memory_format=torch.channels_last) if case.channels_last else images
    return images, torch.randint(0, classes, (shape[0],), **kind)


def options_of(case: Case, interval: tuple[int, int], variant: str, args: argparse.Namespace) -> dict:
    """Return K-FAC's settings: a refresh takes all of its interval."""
    options = {"factor_interval": interval[0], "inverse_interval": interval[1], "warmup_refresh": None}
    options |= {"solver": args.solver, "spread_refresh": interval[1], "announce": False}
    options |= {"statistics_fraction": FRACTIONS[variant], "tf32": True, "cuda_graph": True, **case.kfac}
    for text in args.set:
        key, _, value = text.partition("=")
        options[key] = value
        with contextlib.suppress(ValueError, SyntaxError):
            options[key] = ast.literal_eval(value)
    return known(options, args)


def known(options: dict, args: argparse.Namespace) -> dict:
    """Return the options without those that this dkfac does not have, where that is allowed."""
    unknown = sorted(set(options) - set(dkfac.Settings.__dataclass_fields__))
    if not unknown or not (args.tiny or args.drop_unknown):
        return options
    print(f"dropped, not known to this dkfac: {', '.join(unknown)}", file=sys.stderr)
    return {key: value for key, value in options.items() if key not in unknown}


def kind_of(options: dict, step: int) -> str:
    """Say what K-FAC does in a step, by its own rhythm."""
    rhythm = ("factor_interval", "inverse_interval", "warmup_refresh", "spread_refresh")
    settings = dkfac.Settings(**{name: options[name] for name in rhythm if name in options})
    measures, is_due = settings.rhythm(step)
    if is_due:
        return "refresh"
    kind = "factor" if measures else "ordinary"
    return f"{kind}+slice" if step in settings.refresh_steps(step)[0] else kind


def add_common(parser: argparse.ArgumentParser) -> Callable:
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tiny", action="store_true", help="stand-ins and few steps, to try the script")
    add("--drop-unknown", action="store_true", help="leave out settings that this dkfac does not have")
    add("--solver", default="cholesky")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting of K-FAC")
    add("--fused", action="store_true", help="fused optimizers, with and without K-FAC")
    add("--cudnn-benchmark", action="store_true")
    return add


def parse_case(text: str) -> list[tuple[str, tuple[int, int]]]:
    """``resnet50`` is all of a case's intervals, ``resnet50:10/100`` one of them."""
    name, _, interval = text.partition(":")
    if name not in CASES:
        sys.exit(f"no case {name!r}; there are {', '.join(CASES)}")
    if not interval:
        return [(name, pair) for pair in CASES[name].intervals]
    factor, inverse = (int(part) for part in interval.split("/"))
    return [(name, (factor, inverse))]


def default_out(name: str, args: argparse.Namespace) -> pathlib.Path:
    """Where results go unless told: a trial's do not belong beside measured ones."""
    return pathlib.Path(tempfile.gettempdir() if args.tiny else "benchmarks/results") / name


def switches() -> dict:
    return {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
    }
