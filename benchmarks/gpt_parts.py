"""Host time and GPU time of a GPT's step, with Adam in the eigenbasis.

The GPTs of ``char_gpt.py``. ``wall``: time per step without synchronization; ``host``: time of a step that starts on an
idle device; ``gpu``: time per step if all steps are launched before the device starts. Modes, after a warm-up with the
usual intervals: steps that neither measure nor refresh, steps that only refresh, steps that only measure. Run it on an
otherwise idle machine.
"""

import argparse
import statistics
import sys
import time

import char_gpt
import gpt_limits
import torch
import transformer_study
from environment import write

from dkfac.config.settings import Settings
from dkfac.decompose import refresh_scheduler

KL = {"rescale": "kl-clip", "kl_clip": 1e-4}
RHYTHM, PATIENCE = Settings.rhythm, refresh_scheduler.LOOK_AFTER_STEPS
MODES = {
    "nothing": lambda settings, n: (n == 0, n == 0),
    "refresh": lambda settings, n: (n == 0, n % 5 == 0),
    "measure": lambda settings, n: (True, n == 0),
}
CASES = [
    ("adamw", "adamw", {}, None),
    ("1/5", "adam-eigen", gpt_limits.rhythm(1, 5, **KL), None),
    *((f"1/5, {mode} alone", "adam-eigen", gpt_limits.rhythm(1, 5, **KL), mode) for mode in MODES),
    ("5/5", "adam-eigen", gpt_limits.rhythm(5, 5, **KL, factor_decay=0.8), None),
    ("4/20", "adam-eigen", gpt_limits.rhythm(4, 20, **KL), None),
]


def measure(name: str, options: dict, mode: str | None, size: dict, data) -> dict[str, float]:
    Settings.rhythm = RHYTHM
    task = char_gpt.Characters(data, size, "cuda")
    torch.manual_seed(0)
    generator = torch.Generator("cuda").manual_seed(0)
    model = task.model().to("cuda")
    options = options and options | {"block_dim": size["width"] + 16}
    used = transformer_study.optimizers(name, model, 3e-3, {})
    kfac = transformer_study.attach({"optimizer": name, "options": options}, task, model, used[-1])

    def steps(number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            x, y = task.batch(generator)
            for o in used:
                o.zero_grad()
            task.loss(model, x, y).backward()
            for o in used:
                o.step()
        return time.perf_counter() - begin

    steps(110)
    Settings.rhythm = MODES.get(mode, RHYTHM)
    steps(30)
    walls, hosts, gpus = [], [], []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps(40)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) / 40)
    for _ in range(20):
        torch.cuda.synchronize()
        hosts.append(steps(1))
    refresh_scheduler.LOOK_AFTER_STEPS = 10**6  # nothing waits for what a refresh found
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):  # two steps are about as many launches as can be under way
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e8))
        start.record()
        steps(2)
        end.record()
        torch.cuda.synchronize()
        gpus.append(start.elapsed_time(end) / 2)
    refresh_scheduler.LOOK_AFTER_STEPS = PATIENCE
    del kfac
    return {"wall": 1e3 * min(walls), "host": 1e3 * statistics.median(hosts), "gpu": statistics.mean(gpus)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=char_gpt.SIZES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cases", help="by default all, separated by semicolons")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    data, found = char_gpt.read_text(4_000_000), {}
    size = char_gpt.SIZES[args.size] | {"batch": args.batch}
    wanted = args.cases.split(";") if args.cases else [label for label, *_ in CASES]
    for label, name, options, mode in CASES:
        if label not in wanted:
            continue
        found[label] = measure(name, options, mode, size, data)
        print(label, " ".join(f"{key} {value:.2f} ms" for key, value in found[label].items()), flush=True)
        write(args.out, {"size": size, "milliseconds": found})


if __name__ == "__main__":
    sys.exit(main())
