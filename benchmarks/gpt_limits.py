"""Why does a GPT's loss jump when the learning rate peaks, with Adam in the eigenbasis? Tries variants of the step.

The GPT of ``char_gpt.py --size small`` (10.8M parameters, 500 steps or ``steps``), without tuning and with one seed, to
find out which changes matter. Options of a config:
``limit``: how updates are limited in each layer: ``rms`` bounds their root mean square, ``norm`` sets their norm,
``spectral`` bounds the largest singular value times the learning rate; ``kl`` limits all layers by the change of the
output that K-FAC's curvature predicted at the previous step (for single layers use ``rescale="kl-clip"``).
``groups``: learning rates by parts of parameter names; ``size``: another GPT; ``clip``: gradient norm clipping;
``warm``: fraction of warm-up steps; ``fp32``: no autocast; ``track``: log the mean change of each weight over the
learning rate every so many steps; ``seed``. Runs share the GPU. ``--again``: repeat the configs of a result file.
``--study cpu``: a smaller study for two cores, at full width with fewer tokens, and of intervals and ``block_dim`` at a
third of the width.
"""

import argparse
import json
import pathlib
import sys
import time

import char_gpt
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformer_study
from environment import write
from torch import Tensor

from dkfac.ops.precondition import rotate, spectrum
from dkfac.precondition import adam_eigen

BASE = {"solver": "warm-eigen", "cuda_graph": True, "tf32": True, "statistics_fraction": 0.25}


def rhythm(factors: int, inverses: int, **more) -> dict:
    return BASE | {"factor_interval": factors, "inverse_interval": inverses, "spread_refresh": inverses, **more}


SPLIT = rhythm(1, 5, block_dim=400)


def held_by(kl_clip: float) -> dict:
    return SPLIT | {"rescale": "kl-clip", "kl_clip": kl_clip}


REST = {"tokens": 3e-3, "places": 3e-3, "head": 3e-3, "norm": 3e-3}
STUDY: list[dict] = [
    *({"lr": lr, "options": SPLIT, "steps": 250} for lr in (0.006, 0.012, 0.024)),
    *({"lr": 0.012, "options": SPLIT, "steps": 250, "limit": ["rms", c]} for c in (0.03, 0.05, 0.1)),
    {"lr": 0.024, "options": SPLIT, "steps": 250, "limit": ["rms", 0.05]},
    *({"lr": 0.012, "options": SPLIT, "steps": 250, "limit": ["spectral", c]} for c in (0.03, 0.06, 0.12)),
    {"lr": 0.024, "options": SPLIT, "steps": 250, "limit": ["spectral", 0.06]},
    {"lr": 0.012, "options": SPLIT, "steps": 250, "limit": ["spectral", 0.06], "groups": REST},
    *({"lr": 0.012, "options": SPLIT, "steps": 250, "limit": ["kl", c]} for c in (3e-4, 1e-3, 3e-3, 1e9)),
    {"lr": 0.024, "options": SPLIT, "steps": 250, "limit": ["kl", 1e-3]},
    *({"lr": 0.012, "options": held_by(c), "steps": 250} for c in (3e-5, 1e-4, 2e-4, 4e-4, 1e-3)),
    *({"lr": 0.024, "options": held_by(c), "steps": 250} for c in (1e-4, 4e-4)),
    {"lr": 0.006, "options": held_by(2e-4), "steps": 250},
    {"lr": 0.012, "options": held_by(2e-4)},
    {"lr": 0.012, "options": rhythm(1, 5), "steps": 250, "limit": ["rms", 0.05]},
    {"lr": 0.012, "options": rhythm(2, 10, block_dim=400), "steps": 250, "limit": ["rms", 0.05]},
    {"lr": 0.012, "options": rhythm(1, 2, block_dim=400), "steps": 250, "limit": ["rms", 0.05]},
    {"lr": 0.012, "options": SPLIT, "limit": ["rms", 0.05]},
    {"lr": 0.012, "options": SPLIT, "limit": ["spectral", 0.06]},
    {"lr": 0.012, "options": SPLIT, "limit": ["kl", 1e-3]},
    {"optimizer": "muon", "lr": 0.04, "steps": 250},
]


def narrow(factors: int, inverses: int, **more) -> dict:
    size = {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16, "steps": 400}
    options = {"solver": "warm-eigen", "factor_interval": factors, "inverse_interval": inverses, **more}
    return {"lr": 0.006, "most": 200, "size": size, "options": options}


def wide(**more) -> dict:
    options = {"solver": "warm-eigen", "factor_interval": 4, "inverse_interval": 20, "block_dim": 400, **more}
    limit = {} if "rescale" in more else {"limit": ["kl", 1e9]}  # which tells and does not hold back
    return {"lr": 0.006, "most": 85, "size": {"context": 128, "batch": 16}, "options": options} | limit


STUDIES = {
    "gpu": STUDY,
    "cpu": [wide(), wide(rescale="kl-clip", kl_clip=2e-4), narrow(1, 5), narrow(1, 5, block_dim=200), narrow(1, 10),
            narrow(1, 5, block_dim=64)],
}  # fmt: skip


def quadratic(stack, states, update: Tensor) -> Tensor:
    """Return ``u^T (A x G) u`` of the updates of a stack's layers, ``[layers]``."""
    bases = stack.decompositions(states)
    if stack.transposed:
        bases = {"A": bases["G"], "G": bases["A"]}
    return (rotate(update, bases).square() * spectrum(bases, update.shape)).sum((-2, -1))


def limited(how: str, most: float, rate: dict[str, Tensor]):
    """Return Adam's update in the eigenbasis, held back."""
    whole = adam_eigen.adam_updates

    def directions(stack, states, *given) -> tuple[Tensor, None]:
        update, _ = whole(stack, states, *given)
        if how == "kl":
            rate["now"] += quadratic(stack, states, update).sum() * rate["lr"].square()
            return update * (most / rate["last"].clamp(min=most)).sqrt(), None
        if how == "spectral":
            largest = update.square().sum(-1).argmax(-1)[:, None, None].expand(-1, 1, update.shape[-1])
            x = update.gather(1, largest).mT
            for _ in range(4):
                x = F.normalize(update.mT @ (update @ x), dim=1)
            length = (update @ x).norm(dim=1, keepdim=True) * rate["lr"]
        else:
            down, across = stack.sizes
            length = update.square().sum((-2, -1), keepdim=True).div(down * across).sqrt()
        return update * (most / (length.clamp(min=1e-12) if how == "norm" else length.clamp(min=most))), None

    return directions


def train(config: dict, data, device: str) -> dict:
    size = char_gpt.SIZES["small"] | {"steps": config.get("steps", 500)} | config.get("size", {})
    task = char_gpt.Characters(data, size, device)
    torch.manual_seed(config.get("seed", 0))
    generator = torch.Generator(device).manual_seed(config.get("seed", 0))
    model, steps, lr = task.model().to(device), size["steps"], config["lr"]
    name, rates, parameters = config.get("optimizer", "adam-eigen"), config.get("groups", {}), model.named_parameters()
    used = transformer_study.optimizers(name, model, lr, {})
    if name == "adam-eigen":
        groups = [{"params": [p], "lr": next((r for part, r in rates.items() if part in n), lr)} for n, p in parameters]
        used = [torch.optim.AdamW(groups, betas=tuple(config.get("betas", (0.9, 0.95))), weight_decay=0.01)]
    rate, before = {key: torch.zeros((), device=device) for key in ("lr", "now", "last")}, adam_eigen.adam_updates
    totals = []
    if "limit" in config:
        adam_eigen.adam_updates = limited(*config["limit"], rate)
    transformer_study.attach({"optimizer": name, "options": config.get("options", {})}, task, model, used[-1])
    warm, losses, begin = round(steps * config.get("warm", transformer_study.WARMUP)), [], time.perf_counter()
    tracks: dict[str, str] = {}
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / warm) * max(0.0, 1 - t / steps)) for o in used
    ]
    for step in range(config.get("most", steps)):
        rate["lr"].fill_(lr * min(1.0, (step + 1) / warm) * max(0.0, 1 - step / steps))
        rate["last"].copy_(rate["now"])
        rate["now"].zero_()
        totals.append(rate["last"].clone())
        x, y = task.batch(generator)
        for o in used:
            o.zero_grad()
        found = model(x) if config.get("fp32") else None
        loss = task.loss(model, x, y) if found is None else F.cross_entropy(found.flatten(0, -2), y.flatten())
        loss.backward()
        losses.append(loss.detach())
        if "clip" in config:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        is_tracked = step > 0 and step % config.get("track", steps) == 0
        was = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("weight") and is_tracked}
        for o, schedule in zip(used, schedules, strict=True):
            o.step()
            schedule.step()
        changes = {n: (p.detach() - was[n]).square().mean().sqrt() / rate["lr"]
                   for n, p in model.named_parameters() if n in was}  # fmt: skip
        if was:
            tracks[str(step)] = " ".join(f"{name}:{float(value):.3f}" for name, value in changes.items())
    adam_eigen.adam_updates = before
    told = " ".join(f"{float(loss):.3f}" for loss in losses)
    found = {"config": config, "final": task.validate(model), "losses": told, "seconds": time.perf_counter() - begin}
    found |= {"tracks": tracks} if tracks else {}
    return found | ({"kl": " ".join(f"{float(t):.1e}" for t in totals)} if config.get("limit", [""])[0] == "kl" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="gpu")
    parser.add_argument("--configs", help="JSON list instead of a study")
    parser.add_argument("--again", metavar="FILE", help="the configs of a result instead of a study")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=500, help="what is not done by then is left out")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    configs = json.loads(args.configs) if args.configs else STUDIES[args.study]
    if args.again:
        configs = [run["config"] for run in json.loads(pathlib.Path(args.again).read_text())["runs"]]
    data, runs, end = char_gpt.read_text(4_000_000), [], time.perf_counter() + args.seconds
    with mp.get_context("spawn").Pool(args.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.apply_async(train, (config, data, device)) for config in configs]
        for config, job in zip(configs, jobs, strict=True):
            try:
                run = job.get(timeout=max(1.0, end - time.perf_counter()))
            except mp.TimeoutError:
                continue
            curve = [float(x) for x in run["losses"].split()][::25]
            print(f"{run['final']:.4f} {json.dumps(config)} {' '.join(f'{x:.2f}' for x in curve)}", flush=True)
            runs.append(run)
            write(args.out, {"runs": runs})


if __name__ == "__main__":
    sys.exit(main())
