"""Draw docs/large_batch.png and docs/staleness.png from the committed results of benchmarks/large_batch_cifar.py."""

import json
import pathlib
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
KINDS = [("sgd", "", "SGD", "#9a9a9a", "-"), ("kfac", "", "K-FAC", "#c1440e", "-"),
         ("kfac", " in 60%", "K-FAC, 60% of the steps", "#c1440e", ":")]  # fmt: skip
STATISTICS = [("0 A", "#4477aa"), ("3.conv1 A", "#66ccee"), ("3.conv1 G", "#ccbb44"), ("11.conv2 G", "#c1440e")]


def read(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text())


def tidy(axes) -> None:
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def batches(out: pathlib.Path) -> None:
    table = read("large_batch_cifar_h200.json")["table"]
    sizes = (256, 1024, 4096, 8192)
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for label, suffix, name, colour, style in KINDS:
        entries = [table[f"{label} {size}{suffix}"] for size in sizes]
        axes.plot(sizes, [100 * e["median"] for e in entries], style, marker="o", color=colour, lw=2, label=name)
        for size, entry in zip(sizes, entries, strict=True):
            axes.plot([size] * len(entry["tests"]), [100 * t for t in entry["tests"]], "_", color=colour, ms=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set(xlabel="batch (examples)", ylabel="test accuracy (%)")
    axes.set_title("CIFAR-10, ResNet-20, 30 epochs: medians and all of three seeds", fontsize=10)
    axes.legend(frameon=False)
    tidy(axes)
    figure.savefig(out / "large_batch.png", dpi=130)


def staleness(out: pathlib.Path) -> None:
    found = read("large_batch_staleness_h200.json")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for how, colour in (("fixed", "#9a9a9a"), ("change", "#c1440e"), ("basis", "#4477aa")):
        entries = [(name.split()[1], e) for name, e in found["table"].items() if name.split()[0] == how]
        entries.sort(key=lambda entry: median(entry[1]["refreshes"]))
        for _, e in entries:
            left.plot(e["refreshes"], [100 * t for t in e["tests"]], ".", color=colour, alpha=0.5)
        x, y = ([median(e[key]) for _, e in entries] for key in ("refreshes", "tests"))
        left.plot(x, [100 * t for t in y], "o-", color=colour, label=how)
        for (given, _), a, b in zip(entries, x, y, strict=True):
            left.annotate(given, (a, 100 * b), xytext=(0, 6), textcoords="offset points", fontsize=7, color=colour)
    left.set(xscale="log", xlabel="factors refreshed", ylabel="test accuracy (%)")
    left.legend(frameon=False, fontsize=8)
    run = next(r for r in found["runs"] if r["config"]["label"] == "change 0.2" and r["intervals"])
    for name, colour in STATISTICS:
        points = [tuple(map(int, entry.split(":"))) for entry in run["intervals"][name].split()]
        right.step(*zip(*points, strict=True), where="post", color=colour, label=name, lw=1.3)
    right.set(yscale="log", xlabel="step", ylabel="steps to the next refresh")
    right.legend(frameon=False, fontsize=8, title='"change", 0.2', title_fontsize=8)
    for axes in (left, right):
        tidy(axes)
    figure.savefig(out / "staleness.png", dpi=130)


if __name__ == "__main__":
    batches(HERE.parent / "docs")
    staleness(HERE.parent / "docs")
