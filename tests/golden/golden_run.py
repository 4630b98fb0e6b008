"""Compare the runs of ``golden_cases.py`` between two trees, bit by bit.

    python tests/golden/golden_run.py dump OUT.pt [--cases a,b] [--ways one,four,graphs]
    python tests/golden/golden_run.py compare A.pt B.pt
    python tests/golden/golden_run.py parent [REV]      # REV, HEAD~1 unless told, against this tree as it is
    python tests/golden/golden_run.py write             # makes values.json

Bits depend on the CPU and on the number of threads: compare what was dumped on one machine.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VALUES = HERE / "values.json"
WORKERS = 2
AGREE = 1e-13
"""Relative difference between kernels for two kinds of CPU up to which values are committed, a tenth of the test's."""
OTHER_CPU = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Environment in which torch and MKL use the kernels of another CPU."""


# --- running all -----------------------------------------------------------------------------------------------


def _run(pair):
    import golden_cases

    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        found = golden_cases.run(*pair)
    except Exception as error:
        raise RuntimeError(f"{pair[0]} {pair[1]}: {type(error).__name__}: {error}") from error
    packed = io.BytesIO()  # tensors themselves would travel as file descriptors, of which there are few
    torch.save(found, packed)
    return pair, packed.getvalue(), time.perf_counter() - begin


def run_all(pairs):
    """Return ``{"case way": result}``."""
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        done = list(workers.map(_run, pairs))
    slowest = sorted(done, key=lambda item: -item[2])[:3]
    print("slowest:", ", ".join(f"{name} {way} {t:.1f} s" for (name, way), _, t in slowest), file=sys.stderr)
    return {" ".join(pair): torch.load(io.BytesIO(packed), weights_only=True) for pair, packed, _ in done}


def chosen(cases, ways):
    import golden_cases

    every = golden_cases.pairs()
    unknown = set(cases or ()) - {name for name, _ in every}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return [(name, way) for name, way in every if (not cases or name in cases) and (not ways or way in ways)]


def dump(out, cases=None, ways=None):
    import dkfac

    expected = os.environ.get("GOLDEN_TREE", str(ROOT))
    where = Path(dkfac.__file__).resolve().parent.parent
    assert where == Path(expected).resolve(), f"dkfac is imported from {where}, not from {expected}"
    begin, pairs = time.perf_counter(), chosen(cases, ways)
    torch.save(run_all(pairs), out)
    print(f"{len(pairs)} runs of {where}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)


# --- comparing ---------------------------------------------------------------------------------------------------


def difference(one, other):
    """Return the largest difference relative to the norm; inf where shapes or what is finite differ."""
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    if torch.equal(one.nan_to_num(), other.nan_to_num()):
        return 0.0
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).norm() / max(float(other.norm()), 1e-300))


def differences(one, other):
    """Return ``{path: difference}`` of what differs between two results; a path that one lacks differs by inf."""
    found = {path: float("inf") for path in one.keys() ^ other.keys()}
    found |= {path: difference(one[path], other[path]) for path in one.keys() & other.keys()}
    return {path: d for path, d in found.items() if d != 0}


def compare(a, b):
    """Print a line for each run that differs; returns whether none does."""
    one, other = torch.load(a, weights_only=True), torch.load(b, weights_only=True)
    bad = sorted(one.keys() ^ other.keys())
    for run in bad:
        print(f"{run}: in one of the two only")
    for run in one:
        found = differences(one[run], other[run]) if run in other else {}
        if found:
            bad.append(run)
            first = min((p for p in found if "after" in p), key=lambda p: p[p.index("after") :], default="")
            worst = max(found, key=found.get)
            since = f", first seen in {first}" if first else ""
            print(f"{run}: {len(found)} of {len(one[run])} differ, most {worst} by {found[worst]:.1e}{since}")
    print(f"{len(one)} runs, {len(bad)} differ")
    return not bad


def _dump_tree(tree, out, arguments, environment=None):
    """Dump a tree's dkfac with the cases of this tree."""
    given = os.environ | {"PYTHONPATH": str(tree), "GOLDEN_TREE": str(tree)} | (environment or {})
    script = Path(__file__).resolve()
    subprocess.run([sys.executable, str(script), "dump", str(out), *arguments], check=True, cwd=tree, env=given)


def parent(revision, arguments):
    """Compare a revision with this tree as it is; returns whether they are the same."""
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        tree, before, after = (Path(folder).resolve() / name for name in ("tree", "before.pt", "after.pt"))
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            _dump_tree(tree, before, arguments)
            _dump_tree(ROOT, after, arguments)
            return compare(before, after)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


# --- committed values -------------------------------------------------------------------------------------------


def summary(tensor):
    """Return the norm and the product with fixed random numbers of about that size."""
    flat = tensor.flatten()
    fixed = torch.randn(len(flat), generator=torch.Generator().manual_seed(len(flat)), dtype=torch.float64)
    return [float(flat.norm()), float(flat @ fixed)]


def summaries(result, after):
    """Return the summaries of parameters and factors after a step: what is the same for other BLAS kernels.

    With ranks: the parameters of rank 0, and the factors that each holds and those before do not.
    """
    found, seen, mark = {}, set(), f"after{after:02d}."
    for path, tensor in result.items():
        rank, _, rest = path.partition(mark)
        if not rest or mark not in path or not tensor.isfinite().all():
            continue
        if rest not in seen:
            seen.add(rest)
            found[rank + rest] = summary(tensor)
    return found


def distance(values, others):
    """Return the largest difference of two dicts of summaries, relative to the norms."""
    if values.keys() != others.keys():
        return float("inf")
    pairs = ((values[path], others[path]) for path in values)
    return max((max(abs(a - b) for a, b in zip(*pair, strict=True)) / (pair[0][0] + 1e-2) for pair in pairs), default=0)


def write():
    """Make values.json: for each run the last snapshot that other kernels come to as well."""
    import golden_cases

    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here.pt", Path(folder) / "there.pt"
        _dump_tree(ROOT, here, [])
        _dump_tree(ROOT, there, [], OTHER_CPU)
        one, other = (torch.load(path, weights_only=True) for path in (here, there))
    values = {}
    for run, result in one.items():
        for after in reversed(golden_cases.SNAPSHOTS):
            found = summaries(result, after)
            if distance(found, summaries(other[run], after)) <= AGREE:
                break
        else:
            after, found = 0, {}
        values[run] = {"after": after, "values": found}
        if after < golden_cases.STEPS:
            print(f"{run}: values after {after} steps only", file=sys.stderr)
    lines = [f"{json.dumps(run)}: {json.dumps(found, separators=(',', ':'))}" for run, found in values.items()]
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("dump", "compare", "parent", "write"):
        command = commands.add_parser(name)
        if name == "dump":
            command.add_argument("out")
        if name == "compare":
            command.add_argument("a")
            command.add_argument("b")
        if name == "parent":
            command.add_argument("revision", nargs="?", default="HEAD~1")
        if name in ("dump", "parent"):
            command.add_argument("--cases", default="")
            command.add_argument("--ways", default="")
    given = parser.parse_args()
    if given.command == "dump":
        dump(given.out, *([part for part in text.split(",") if part] for text in (given.cases, given.ways)))
    elif given.command == "write":
        write()
    elif given.command == "compare":
        sys.exit(0 if compare(given.a, given.b) else 1)
    else:
        sys.exit(0 if parent(given.revision, ["--cases", given.cases, "--ways", given.ways]) else 1)


if __name__ == "__main__":
    main()
