"""How far is K-FAC's fast path from float64? Preconditioned gradients of ResNet-50 on real images, layer by layer.

The model takes 20 plain SGD steps first, so that it is not at its initial point. Then each variant of K-FAC measures
and refreshes on one batch several times, because the first refresh of a run uses a slower path than later ones, which
the fast settings (``cholesky`` with TF32) replay from CUDA graphs. In the same
backward pass plain hooks record each layer's input and the gradient of its output. From these the oracle
(``gpu_oracle.py``) follows the formulas in float64: ``A = 1/R sum a a^T`` over R patches, ``G = 1/T sum g^ g^T`` with
``g^ = T g`` and T examples, and ``(A x G + l I)^-1`` (eigen) or ``(G + sqrt(l)/pi I)^-1 . (A + pi sqrt(l) I)^-1``
(cholesky). ``moved`` is the distance of the oracle's direction from that of the raw gradient, to compare errors with.

Images: CIFAR-10 from the archive, enlarged to 224 pixels. ``--device cpu --tiny`` is a smoke test of the script.
"""

import argparse
import io
import itertools
import pathlib
import statistics
import sys
import tarfile
import time

import torch
import torch.nn.functional as F
from cifar import normalise
from environment import write
from gpu_cases import add_common, default_out, free, known, resnet50, switches, wait
from gpu_oracle import Oracle, Recorder, cosine, distance, factors_of, gradient
from torch import Tensor, nn

import dkfac

DAMPING = 1e-3
DTYPES = {"bf16": torch.float32, "float32": torch.float32, "float64": torch.float64}


def images_of(path: str, number: int) -> tuple[Tensor, Tensor]:
    """Return training images ``[number, 3, 32, 32]`` (uint8) spread over the archive, which is sorted by class."""
    import numpy
    from PIL import Image

    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) < 3 or parts[-3] != "train":
                continue
            # 2654435761 scatters file numbers, so that one in so many of every class is taken
            if (int("".join(filter(str.isdigit, parts[-1])) or 0) * 2654435761 >> 8) % 1000 < number / 50:
                file = archive.extractfile(member)
                assert file is not None
                found.append((parts[-2], numpy.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))))
    classes = sorted({name for name, _ in found})
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(numpy.stack([image for _, image in found])).permute(0, 3, 1, 2)
    return images[order], torch.tensor([classes.index(name) for name, _ in found])[order]


def batches_of(args: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return one batch per SGD step and a last one to measure, as the model takes them but not enlarged."""
    count = args.sgd_steps + 1
    if args.archive:
        images, labels = images_of(args.archive, int(1.2 * count * args.batch))
        if len(images) < count * args.batch:
            print(f"only {len(images)} images: some are used twice", file=sys.stderr)
        index = torch.arange(count * args.batch) % len(images)
        images, labels = images[index], labels[index]
    else:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (count * args.batch, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (count * args.batch,), generator=generator)
    return [(x.to(args.device), y.to(args.device)) for x, y in zip(
        images.split(args.batch), labels.split(args.batch), strict=True)]  # fmt: skip


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> Tensor:
    model.zero_grad()
    images = F.interpolate(normalise(batch[0]), size=args.size, mode="bilinear", antialias=False)
    images = images.to(DTYPES[args.precision], memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        loss = F.cross_entropy(model(images), batch[1])
    loss.backward()
    return loss.detach()


def trained_model(batches: list, args: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = resnet50(args.tiny).to(args.device, DTYPES[args.precision], memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for batch in batches:
        losses.append(backward(model, batch, args))
        optimizer.step()
    return model, [float(loss) for loss in losses]


def sampled_rows(layer, x: Tensor, g: Tensor, kfac: dkfac.KFAC) -> tuple[Tensor, Tensor, float] | None:
    """HOOK: return the part of a layer's input and gradient that K-FAC measures in this step, and how many rows of the
    layer there are for each of these; None where this dkfac does not tell (then all rows are taken).

    Only this function knows how ``statistics_fraction`` chooses: ``dkfac.layers.rows`` says which slice of the examples
    it takes. To be called before ``kfac.step()``, after which the next step's choice holds.
    """
    if kfac.settings.describe().get("statistics_fraction", 1.0) == 1.0:
        return x, g, 1.0
    try:
        from dkfac.layers.rows import rows_of

        sizes = {"examples": len(x), "batch_dim": 0, "batch_stats": True}
        rows = next(rows_of(layer, x, g, sample=kfac._collector.sample, **sizes))
        if rows.picked is None:
            return x, g, 1.0
        examples = rows.picked.here[0]
        return x[examples], g[examples], rows.ratio
    except (ImportError, AttributeError, TypeError):
        return None


class Study:
    """The model and batch of all variants, and the oracles, which are kept while the recorded tensors stay the same."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> None:
        self.model, self.batch, self.args = model, batch, args
        self.kept: dict[tuple, tuple[tuple, Oracle]] = {}
        self.num_oracles = 0
        self.begin = time.perf_counter()

    def oracle(self, layer, pair: list[Tensor], part: tuple[Tensor, Tensor, float], fraction: float) -> Oracle:
        seen = tuple(float(t.double().square().sum()) for t in pair)
        held = self.kept.get((layer.name, fraction))
        if held is None or held[0] != seen:
            x, g, ratio = part
            held = seen, Oracle(*factors_of(layer.module, x, g, len(self.batch[0]), ratio), DAMPING)
            self.kept[layer.name, fraction] = held
            self.num_oracles += 1
        return held[1]

    def run(self, solver: str, tf32: bool, mode: str, fraction: float) -> dict:
        """Precondition with one variant and compare each layer with the oracle."""
        free()
        args = self.args
        options = {"damping": DAMPING, "damping_mode": mode, "rescale": "none", "solver": solver, "announce": False}
        options |= {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None, "factor_decay": 0.0}
        options |= {"tf32": tf32, "cuda_graph": tf32 and solver == "cholesky", "statistics_fraction": fraction}
        kfac = dkfac.KFAC(self.model, **known(options, args))
        every = -(-len(kfac.layers) // args.layers) if args.layers else 1
        layers = kfac.layers[::every]
        for _ in range(args.refreshes - 1):
            backward(self.model, self.batch, args)
            kfac.step()
        recorder = Recorder(layers)
        backward(self.model, self.batch, args)
        seen = recorder.close()
        raw = {layer.name: gradient(layer.module) for layer in layers}
        parts = {layer.name: sampled_rows(layer, *seen[layer.name], kfac) for layer in layers}
        kfac.step()
        found = {layer.name: gradient(layer.module) for layer in layers}
        running, counters, delicate = kfac.factors(), kfac.report()["counters"], kfac.report()["delicate_layers"]
        kfac.close()
        rows, skipped = {}, []
        for layer in sorted(layers, key=lambda la: max(f.dim for f in la.spec.factors)):
            name, dim = layer.name, max(f.dim for f in layer.spec.factors)
            late = time.perf_counter() - self.begin > args.seconds
            if solver == "eigen" and (dim > args.eigen_dim or late):
                skipped.append(f"{name} ({'out of time' if late else dim})")
                continue
            pair = seen[name]
            full = self.oracle(layer, pair, (*pair, 1.0), 1.0)
            oracle = full if fraction == 1.0 else self.oracle(layer, pair, parts[name] or (*pair, 1.0), fraction)
            wanted = oracle.solve(raw[name], solver, mode)
            row = {"error": distance(found[name], wanted), "one_minus_cosine": 1 - cosine(found[name], wanted)}
            row |= {f"{key}_error": distance(running[name][key], getattr(oracle, key.lower())) for key in "AG"}
            row["moved"] = distance(raw[name] * (wanted.norm() / raw[name].norm()), wanted)
            if fraction < 1.0:
                ideal = full.solve(raw[name], solver, mode)
                row |= {"from_full": distance(found[name], ideal), "cosine_to_full": cosine(found[name], ideal)}
                row |= {f"{key}_from_full": distance(running[name][key], getattr(full, key.lower())) for key in "AG"}
            rows[name] = row | {"dims": [f.dim for f in layer.spec.factors]}
        known_rows = all(part is not None for part in parts.values())
        chosen = {"solver": solver, "tf32": tf32, "damping_mode": mode, "statistics_fraction": fraction}
        return {
            **chosen,
            "rows_known": known_rows,
            "counters": counters,
            "delicate_layers": delicate,
            **summary(rows),
            "skipped": skipped,
            "layers": rows,
        }


def summary(rows: dict[str, dict]) -> dict:
    """Return median and worst of each figure over the layers, and the layer that is worst."""
    result: dict = {}
    for key in [key for key in next(iter(rows.values()), {}) if key != "dims"]:
        sign = -1 if key == "cosine_to_full" else 1
        worst = max(rows, key=lambda name: sign * rows[name][key])
        middle = statistics.median(row[key] for row in rows.values())
        result[key] = {"median": middle, "worst": rows[worst][key], "worst_layer": worst}
    return {"num_layers": len(rows), "over_layers": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = add_common(parser)
    add("archive", nargs="?", help="CIFAR-10 as benchmarks/cifar.py reads it; without it images are random")
    add("--layers", type=int, default=0, help="compare about so many layers, spread over the depth; 0: all")
    add("--sgd-steps", type=int)
    add("--batch", type=int)
    add("--refreshes", type=int, default=5, help="K-FAC steps on the batch, the last of which is compared")
    add("--eigen-dim", type=int, default=2304, help="largest factor that the oracle decomposes by eigh")
    add("--seconds", type=float, default=50, help="no more eigh of the oracle after this long")
    add("--precision", choices=list(DTYPES), default="bf16", help="of the model; float64 tries the oracle itself")
    add("--out")
    args = parser.parse_args()
    args.sgd_steps = (2 if args.tiny else 20) if args.sgd_steps is None else args.sgd_steps
    args.batch = args.batch or (8 if args.tiny else 128)
    args.size = 16 if args.tiny else 224
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True  # so that all variants see the same tensors, and oracles are made once
    begin = time.perf_counter()
    *batches, last = batches_of(args)
    read = time.perf_counter() - begin
    model, losses = trained_model(batches, args)
    wait(torch.device(args.device))
    study = Study(model, last, args)
    results = []
    modes = ("absolute", "relative")
    fast, slow = ([(s, *v, 1.0) for v in itertools.product((True, False), modes)] for s in ("cholesky", "eigen"))
    for variant in [*fast, *(("cholesky", True, mode, 0.25) for mode in modes), *slow]:
        entry = study.run(*variant)
        results.append(entry)
        figures = entry["over_layers"]
        shown = ", ".join(
            f"{k} {v['median']:.1e} (worst {v['worst']:.1e} {v['worst_layer']})" for k, v in figures.items()
        )
        print(f"{variant}: {entry['num_layers']} layers; {shown}", flush=True)
        found = {"damping": DAMPING, "batch": args.batch, "size": args.size, "precision": args.precision}
        found |= {"archive": bool(args.archive), "sgd_losses": losses, "refreshes": args.refreshes, "tiny": args.tiny}
        found |= {"seconds": time.perf_counter() - begin, "seconds_reading": read, **switches()}
        found |= {"oracles_made": study.num_oracles, "variants": results}
        write(args.out or default_out("gpu_accuracy.json", args), found)


if __name__ == "__main__":
    main()
