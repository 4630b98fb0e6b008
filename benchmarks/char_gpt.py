"""How fast does a small GPT learn characters? AdamW, Muon, SOAP, K-FAC into AdamW and Adam in K-FAC's eigenbasis.

Text: the sources of Python's standard library; every twentieth file is held out. Runs take all steps or a fraction of
them, with the schedule shortened: how many steps does an optimizer need for AdamW's loss? For each number of steps
every optimizer gets the same number of learning rates (``GRIDS``); the best by validation loss is run with further
seeds. Several runs share the machine, so a step's time is measured apart, one optimizer after the other, alone.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from environment import write
from soap import SOAP
from torch import Tensor, nn

import dkfac

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 16, "steps": 500},
    "small": {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "steps": 2000},
    "medium": {"layers": 8, "width": 512, "heads": 8, "context": 256, "batch": 64, "steps": 2000},
}
GRIDS = {
    "adamw": [1e-3, 3e-3, 6e-3, 1e-2, 2e-2],
    "muon": [3e-3, 1e-2, 2e-2, 4e-2, 8e-2],
    "soap": [1e-3, 3e-3, 6e-3, 1e-2, 2e-2],
    "kfac-adamw": [3e-3, 6e-3, 1e-2, 2e-2, 4e-2],
    "adam-eigen": [3e-3, 6e-3, 1e-2, 2e-2, 4e-2],
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, size: dict) -> None:
        super().__init__()
        width = size["width"]
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(size["context"], width)
        self.blocks = nn.Sequential(*(Block(width, size["heads"]) for _ in range(size["layers"])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * size["layers"]) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


def read_text(limit: int) -> tuple[Tensor, Tensor, int]:
    """Return characters to train on and to validate on, as numbers, and how many kinds there are."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py")) + sorted(
        path for folder in ("asyncio", "email", "json", "unittest", "xml", "http", "logging", "importlib")
        for path in (pathlib.Path(os.__file__).parent / folder).rglob("*.py")
    )  # fmt: skip
    parts: tuple[list[str], list[str]] = ([], [])
    for i, path in enumerate(files):
        text = path.read_text(errors="ignore").encode("ascii", "ignore").decode()
        parts[i % 20 == 19].append(text)
    train, held = ("".join(part)[:limit] for part in parts)
    kinds = sorted(set(train + held))
    number = {c: i for i, c in enumerate(kinds)}
    return torch.tensor([number[c] for c in train]), torch.tensor([number[c] for c in held]), len(kinds)


def batch_of(data: Tensor, size: dict, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - size["context"] - 1, (size["batch"], 1), generator=generator)
    rows = data[(starts + torch.arange(size["context"] + 1)).to(data.device)]
    return rows[:, :-1], rows[:, 1:]


def optimizers(name: str, model: nn.Module, lr: float, options: dict) -> list[torch.optim.Optimizer]:
    """Return what steps the model; K-FAC is attached to the last."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks")]
    inner = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inner]
    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    if name == "muon":
        return [torch.optim.AdamW(rest, lr=3e-3, **adamw), torch.optim.Muon(matrices, lr=lr, weight_decay=0.01)]
    if name == "soap":
        return [torch.optim.AdamW(rest, lr=lr, **adamw), SOAP(matrices, lr=lr, frequency=options.get("frequency", 10))]
    return [torch.optim.AdamW(model.parameters(), lr=lr, **adamw)]


def attach(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict) -> dkfac.KFAC | None:
    if name not in ("kfac-adamw", "adam-eigen"):
        return None
    given = {"factor_interval": 2, "inverse_interval": 20, "loss_terms": "token", "skip": ["tokens", "places", "head"]}
    if name == "adam-eigen":
        given["curvature"] = "adam-eigen"
    else:
        given |= {"damping": 1e-2, "damping_mode": "relative"}
    return dkfac.KFAC(model, optimizer, announce=False, **(given | options))


def train(config: dict, data: tuple[Tensor, Tensor, int], device: str) -> dict:
    size = SIZES[config["size"]] | {k: config[k] for k in ("batch",) if k in config}
    steps = round(size["steps"] * config.get("fraction", 1.0))
    torch.manual_seed(config["seed"])
    generator = torch.Generator().manual_seed(config["seed"])
    text, held, kinds = data[0].to(device), data[1].to(device), data[2]
    model = GPT(kinds, size).to(device)
    used = optimizers(config["optimizer"], model, config["lr"], config.get("options", {}))
    kfac = attach(config["optimizer"], model, used[-1], config.get("options", {}))
    warm = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / warm) * max(0.0, 1 - t / steps)) for o in used
    ]
    curve, seconds, last = [], 0.0, min(steps, config.get("most", steps))
    for step in range(last + 1):
        if "most" in config:  # the first steps compile, and refresh more often
            seconds = 0.0 if step == 100 else seconds
        elif step % max(1, steps // 20) == 0:
            curve.append({"step": step, "seconds": seconds, "loss": validate(model, held, size, device)})
        if step == last:
            break
        begin = time.perf_counter()
        x, y = batch_of(text, size, generator)
        for o in used:
            o.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        for o, schedule in zip(used, schedules, strict=True):
            o.step()
            schedule.step()
        if device == "cuda" and step % 10 == 9:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - begin
    if "most" in config:
        return {"seconds": seconds, "timed": last - 100}
    metrics = {} if kfac is None else kfac.metrics()
    result = {"config": config, "steps": steps, "final": curve[-1]["loss"], "seconds": seconds}
    return result | {"curve": curve, "metrics": metrics}


def step_times(names: list[str], base: dict, best: dict, data, device: str) -> dict[str, float]:
    """Return milliseconds of a step, the lower of two rounds, nothing else running."""
    found: dict[str, float] = {}
    for _ in range(2):
        for name in names:
            run = train(base[name] | {"lr": best[name, 1.0], "seed": 0, "most": 220}, data, device)
            found[name] = min(found.get(name, math.inf), 1e3 * run["seconds"] / run["timed"])
    return found


@torch.no_grad()
def validate(model: nn.Module, held: Tensor, size: dict, device: str) -> float:
    generator = torch.Generator().manual_seed(12345)
    losses = []
    for _ in range(20):
        x, y = batch_of(held, size, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses.append(F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()))
    return float(torch.stack(losses).mean())


def run_all(configs: list[dict], data, device: str, workers: int) -> list[dict]:
    """Train all, several at a time, in processes of their own."""
    if workers <= 1:
        return [said(train(config, data, device)) for config in configs]
    with mp.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.apply_async(train, (config, data, device)) for config in configs]
        return [said(job.get()) for job in jobs]


def said(run: dict) -> dict:
    c = run["config"]
    print(f"{c['optimizer']:12} lr {c['lr']:<7g} seed {c['seed']} x{c.get('fraction', 1.0):<5g} {c.get('options', '')} "
          f"loss {run['final']:.4f} in {run['seconds']:.1f} s", flush=True)  # fmt: skip
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="tiny", choices=SIZES)
    add("--optimizers", default=",".join(GRIDS))
    add("--seeds", type=int, default=3)
    add("--fractions", default="0.5,0.33", help="of the steps, which are tried too")
    add("--options", default="{}", help="JSON: further settings of K-FAC, by optimizer")
    add("--lrs", help="instead of the grids")
    add("--workers", type=int, default=2)
    add("--text", type=int, default=4_000_000, help="characters")
    add("--out")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, options = read_text(args.text), json.loads(args.options)
    names = args.optimizers.split(",")
    base = {name: {"size": args.size, "optimizer": name, "options": options.get(name, {})} for name in names}
    grids = {name: [float(lr) for lr in args.lrs.split(",")] if args.lrs else GRIDS[name] for name in names}
    fractions = [1.0, *(float(f) for f in args.fractions.split(",") if f)]
    grid = [base[n] | {"lr": lr, "seed": 0, "fraction": f} for f in fractions for n in names for lr in grids[n]]
    runs = run_all(grid, data, device, args.workers)
    best = {}
    for name in names:
        for fraction in fractions:
            tried = [r for r in runs if (r["config"]["optimizer"], r["config"]["fraction"]) == (name, fraction)]
            best[name, fraction] = min(tried, key=lambda r: r["final"])["config"]["lr"]
    further = [base[n] | {"lr": lr, "seed": seed, "fraction": f} for (n, f), lr in best.items()
               for seed in range(1, args.seeds)]  # fmt: skip
    runs += run_all(further, data, device, args.workers)
    times, table = step_times(names, base, best, data, device), {}
    for (name, fraction), lr in best.items():
        chosen = [
            r for r in runs if r["config"] | {"seed": 0} == base[name] | {"lr": lr, "seed": 0, "fraction": fraction}
        ]
        losses = [r["final"] for r in chosen]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        seconds = times[name] * chosen[0]["steps"] / 1e3
        entry = {"lr": lr, "loss": statistics.mean(losses), "stdev": spread, "seeds": len(losses), "seconds": seconds}
        table[f"{name} x{fraction:g}"] = entry
        print(f"{name:12} x{fraction:<5g} lr {lr:<7g} loss {entry['loss']:.4f} +- {spread:.4f} in {seconds:.1f} s, "
              f"{times[name]:.1f} ms a step", flush=True)  # fmt: skip
    out = args.out or f"benchmarks/results/char_gpt_{args.size}_{'h200' if device == 'cuda' else 'cpu'}.json"
    write(
        out,
        {
            "size": SIZES[args.size],
            "kinds": data[2],
            "workers": args.workers,
            "step_ms": times,
            "table": table,
            "runs": runs,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
