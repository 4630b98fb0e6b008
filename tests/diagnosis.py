"""Measure the shape of the package with ``ast`` and by tracing one real step; test_ratchets.py holds the figures.

``python tests/diagnosis.py`` prints the figures of this checkout, ``--against REV`` those of a revision before them,
``--list NAME`` the places behind one figure.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {
    "cli",
    "recipes",
    "report_page",
    "measure",
    "charts",
    "tools",
    "integrations",
}  # everything else is the library
WHOLE = {"Runner", "KFAC", "Engine"}  # classes that hold everything: what takes one may depend on anything
TRANSPORTS = {"exchange", "transport"}  # what moves tensors between ranks; None where there is one
RANK_COUNTS = {"world_size", "get_world_size", "num_ranks", "world"}
NAMED = {
    "curvature": {"kfac", "ekfac", "adam-eigen", "adaptive"},
    "solver": {"eigen", "cholesky", "warm-eigen"},
    # Without "norm", which is also a value of the setting `rescale`.
    "layer_kind": {
        "linear",
        "linear-map",
        "conv",
        "conv-transposed",
        "conv1d-transposed",
        "attention",
        "embedding",
        "norm-unit",
        "norm-joint",
    },
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Trees = dict[str, ast.Module]  # path below the package -> syntax tree
Found = dict[str, list[str]]  # figure -> the places that it counts, mostly as "file:line what"


def parse(folder: Path) -> Trees:
    return {p.relative_to(folder).as_posix(): ast.parse(p.read_text(), str(p)) for p in sorted(folder.rglob("*.py"))}


def library(trees: Trees) -> Trees:
    return {file: tree for file, tree in trees.items() if file.split("/")[0].removesuffix(".py") not in TOOLS}


def nodes(trees: Trees) -> Iterator[tuple[str, Any]]:
    return ((file, node) for file, tree in trees.items() for node in ast.walk(tree))


def last_name(node: Any) -> str:
    """``a.b.c``, ``c`` and ``c()`` -> ``c``; other expressions -> the empty string."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def parameters(function: Any) -> list[ast.arg]:
    return [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]


def names_in(annotation: ast.AST | None) -> set[str]:
    """Return the names in an annotation, also in one that is a string."""
    parts = list(ast.walk(annotation)) if annotation else []
    quoted = [n.value for n in parts if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {last_name(n) for n in parts} | {name for text in quoted for name in re.findall(r"\w+", text)}


def takers(trees: Trees) -> Found:
    """Read which functions take an object of everything, and all reaches into one, however it was come by."""
    functions, reaches = [], {}
    for file, scope in nodes(trees):
        taken = set()
        if isinstance(scope, FUNCTIONS):
            taken = {p.arg for p in parameters(scope) if p.arg == "runner" or names_in(p.annotation) & WHOLE}
        if taken:
            functions.append(f"{file}:{scope.lineno} {getattr(scope, 'name', 'lambda')}({', '.join(sorted(taken))})")
        for node in ast.walk(scope) if taken or isinstance(scope, ast.Module) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
                name = last_name(node.value)
                if name.lstrip("_") == "runner" or (isinstance(node.value, ast.Name) and name in taken):
                    reaches[node] = f"{file}:{node.lineno} {name}.{node.attr}"
    return {
        "takers_of_everything": functions,
        "files_with_takers": sorted({place.split(":")[0] for place in functions}),
        "reaches_into_everything": list(reaches.values()),
        "attributes_reached": sorted({node.attr for node in reaches}),
    }


def parameter_writes(trees: Trees) -> Found:
    """Read where the library assigns to attributes of a parameter other than self and cls, or of what hangs on one."""
    found = {}
    for file, function in nodes(library(trees)):
        names = {p.arg for p in parameters(function)} - {"self", "cls"} if isinstance(function, FUNCTIONS) else set()
        for node in ast.walk(function) if names else ():
            root: Any = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(root, "id", "") in names:
                found[node] = f"{file}:{node.lineno} {ast.unparse(node)}"
    return {"writes_to_parameters": list(found.values())}


def imports(trees: Trees, package: str = "dkfac") -> dict[str, set[str]]:
    """Return which files import which, anywhere in them: in functions and under TYPE_CHECKING too."""
    modules = {file: ".".join([package, *Path(file).with_suffix("").parts]) for file in trees}
    files = {module.removesuffix(".__init__"): file for file, module in modules.items()}
    graph: dict[str, set[str]] = {file: set() for file in trees}
    for file, node in nodes(trees):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = modules[file].split(".")[: -node.level] if node.level else []
            names = [(".".join([*base, *filter(None, [node.module])]), alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node) == "import_module" and node.args:
            names = [(getattr(node.args[0], "value", ""), "")]
        graph[file] |= {files.get(f"{source}.{name}") or files.get(source, file) for source, name in names} - {file}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two files or more, the largest first."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        todo, reached[start] = [start], set()
        while todo:
            new = graph[todo.pop()] - reached[start]
            reached[start] |= new
            todo += new
    groups = {frozenset({f, *(g for g in reached[f] if f in reached[g])}) for f in graph}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def rank_branches(trees: Trees) -> Found:
    """Read where the code asks whether there are other ranks."""
    missing, counts = [], []
    for file, node in nodes(trees):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = [node.left, node.comparators[0]]
            names = {last_name(side).lstrip("_") for side in sides}
            values = [side.value for side in sides if isinstance(side, ast.Constant)]
            if names & TRANSPORTS and values == [None]:
                missing.append(f"{file}:{node.lineno} {ast.unparse(node)}")
            elif names & RANK_COUNTS and values in ([0], [1], [2]):
                counts.append(f"{file}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.UnaryOp)):  # by truth alone
            tests = [getattr(node, "test", None), getattr(node, "operand", None), *getattr(node, "values", ())]
            bare = [t for t in tests if isinstance(t, (ast.Name, ast.Attribute)) and last_name(t) in TRANSPORTS]
            missing += [f"{file}:{node.lineno} {ast.unparse(t)}" for t in bare]
    return {"exchange_is_none": missing, "branches_on_ranks": [*missing, *counts]}


def public_names(tree: ast.Module) -> set[str]:
    """Return the public functions, classes and constants that a module defines; not what it imports."""
    found, todo = set(), list[Any](tree.body)
    for node in todo:  # it grows
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = [t for whole in getattr(node, "targets", None) or [node.target] for t in ast.walk(whole)]
            found |= {t.id for t in targets if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            todo += ast.iter_child_nodes(node)
    return {name for name in found - {"tl"} if not name.startswith("_")}  # tl: Triton's own, set when kernels compile


def repeated_names(trees: Trees) -> Found:
    """Read which public names are defined in two modules or more: of the library, of the whole package."""
    found = {}
    for figure, part in (("repeated_names_library", library(trees)), ("repeated_names", trees)):
        where = defaultdict(list)
        for file, name in ((file, name) for file, tree in part.items() for name in public_names(tree)):
            where[name].append(file)
        found[figure] = [f"{name}: {', '.join(where[name])}" for name in sorted(where) if len(where[name]) > 1]
    return found


def naming(trees: Trees) -> Found:
    """Read which files of the library name a curvature, a solver or a kind of layer, outside of docstrings."""
    found: Found = {f"files_naming_a_{what}": [] for what in NAMED}
    for file, tree in library(trees).items():
        loose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in loose]
        for what, choices in NAMED.items():
            if named := sorted(choices & {value for value in constants if isinstance(value, str)}):
                found[f"files_naming_a_{what}"].append(f"{file} {' '.join(named)}")
    return found


def private_reaches(trees: Trees) -> Found:
    """Read where tests use a private attribute of something else; torch's own internals do not count."""
    private = [(f, n) for f, n in nodes(trees) if isinstance(n, ast.Attribute) and re.match("_(?!_)", n.attr)]
    places = [f"{file}:{node.lineno} {ast.unparse(node)}" for file, node in private]
    found = [place for place in places if not re.search(r"^\S+ (self\._\w+$|torch\.)", place)]
    return {"private_reaches": found, "private_reach_files": sorted({place.split(":")[0] for place in found})}


def settings_fields(trees: Trees) -> Found:
    classes = [n for _, n in nodes(trees) if isinstance(n, ast.ClassDef) and n.name == "Settings"]
    return {"settings_fields": [n.target.id for c in classes for n in c.body if isinstance(n, ast.AnnAssign)]}


STEP = """
import inspect, json, sys, torch, dkfac
from torch import nn
folder = sys.argv[1]
assert dkfac.__file__ == f"{folder}/__init__.py", f"imported {dkfac.__file__}, not {folder}"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = dkfac.KFAC(model, optimizer, announce=False, warmup_refresh=1.3)
x, y, calls, generators = torch.randn(32, 8), torch.randint(4, (32,)), [], set()
def note(frame, event, _):
    code = frame.f_code
    inner = code.co_name.startswith("<") and code.co_name != "<lambda>"  # a comprehension, or a module's import
    if event == "call" and code.co_filename.startswith(f"{folder}/") and not inner and frame not in generators:
        calls.append([code.co_filename[len(folder) + 1 :], code.co_qualname])
        if code.co_flags & inspect.CO_GENERATOR:  # resumed later, not called again
            generators.add(frame)
for step in range(4):  # each of the first steps measures and refreshes; the last has what the others left
    optimizer.zero_grad()
    calls.clear()
    before = kfac.metrics()["refreshes"]
    sys.setprofile(note)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    sys.setprofile(None)
assert kfac.metrics()["refreshes"] == before + 1, "the traced step did not refresh"
print(json.dumps(calls))
"""


def trace(folder: Path) -> Found:
    """Return what one step that measures and refreshes enters: forward, backward and ``optimizer.step()``."""
    env = {**os.environ, "PYTHONPATH": str(folder.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-Pc", STEP, str(folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the traced step failed:\n{done.stderr}")
    calls = json.loads(done.stdout.splitlines()[-1])
    switches = [f"{a} -> {b}" for (a, _), (b, _) in pairwise(calls) if a != b]
    functions = sorted({f"{file} {name}" for file, name in calls})
    return {"step_files": sorted(dict(calls)), "step_functions": functions, "step_switches": switches}


def measure(package: Path) -> tuple[dict[str, int], Found]:
    """Return the figures of a package, and the places behind those that count places."""
    package = package.resolve()
    trees = parse(package)
    lines = {file: len((package / file).read_text().splitlines()) for file in trees}
    flat = [file for file in trees if "/" not in file and file not in ("__init__.py", "__main__.py")]
    found = {"flat_modules": flat, "files_over_300_lines": [f for f, number in lines.items() if number > 300]}
    groups = cycles(imports(trees, package.name))
    found["modules_in_cycles"] = [f"cycle {number}: {file}" for number, group in enumerate(groups, 1) for file in group]
    found["largest_cycle"] = largest = groups[0] if groups else []
    for reader in (takers, parameter_writes, rank_branches, repeated_names, naming, settings_fields):
        found |= reader(trees)
    found |= private_reaches(parse(package.parent / "tests")) | trace(package)
    parts = {"flat_modules_lines": flat, "library_lines": library(trees), "largest_cycle_lines": largest}
    return {name: len(v) for name, v in found.items()} | {k: sum(lines[f] for f in v) for k, v in parts.items()}, found


def figures(package_dir: Path = ROOT / "dkfac") -> dict[str, int]:
    return measure(package_dir)[0]


def measure_revision(revision: str) -> tuple[dict[str, int], Found]:
    archive = subprocess.run(["git", "archive", revision, "dkfac", "tests"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
        return measure(Path(folder) / "dkfac")


def changes(before: list[str], after: list[str]) -> list[str]:
    """Return what is gone and what is new, whatever the lines."""
    old, new = (Counter(re.sub(r":\d+ ", " ", place) for place in places) for places in (before, after))
    return [f"- {place}" for place in (old - new).elements()] + [f"+ {place}" for place in (new - old).elements()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the figures of the diagnosis.")
    parser.add_argument("--package", type=Path, default=ROOT / "dkfac", help="directory of the package")
    parser.add_argument("--against", metavar="REV", help="a revision to compare with: its figures come first")
    parser.add_argument("--list", metavar="NAME", help="print the places behind a figure; with --against what changed")
    given = parser.parse_args()
    after, places = measure(given.package)
    before, old = measure_revision(given.against) if given.against else ({}, {})
    if given.list and given.list not in places:
        parser.error(f"no list {given.list!r}; there are: {', '.join(places)}")
    if given.list:
        print(*(changes(old[given.list], places[given.list]) if old else places[given.list]), sep="\n")
        return
    for name, value in after.items():
        print(f"{name:<28}" + (f"{before[name]:>8,}" if before else "") + f"{value:>8,}")


if __name__ == "__main__":
    main()
