"""The shape of the package: who may import whom, what is public, what needs torch."""

import ast
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import dkfac

PACKAGE = Path(dkfac.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ANY = None

MAY_IMPORT = {
    "ops": {"ops"},
    "plan": {"plan"},
    "measure": {"comm", "kfac", "layers", "measure", "ops", "plan", "settings"},
    "charts": {"plan"},
    "cli": ANY,
    "__main__": {"cli"},
    "comm": {"comm", "plan"},
    "layers": {"layers", "ops", "plan", "settings"},
    "checks": {"settings"},
    "rhythm": set(),
    "settings": {"checks", "rhythm"},
    "state": {"layers", "ops", "plan"},
    "sums": {"layers", "ops", "plan", "settings", "window"},
    "engine": set(),
    "tape": {"engine", "layers", "ops", "overlap", "plan", "settings", "sums", "timing", "waiting", "window"},
    "calls": {"layers", "ops", "settings", "sums", "window"},
    "waiting": {"calls", "layers", "replay", "tape", "window"},
    "window": set(),
    "capture": {"exact", "layers", "nodes", "settings", "tape"},
    "nodes": {"exact", "settings", "tape"},
    "exact": {"engine", "layers", "settings", "tape"},
    "refresh": {"ops", "settings"},
    "stacks": {"layers", "ops", "state"},
    "stages": {"layers", "ops", "plan", "refresh", "run", "settings", "stacks", "state"},
    "renew": {"inplace", "layers", "ops", "replay", "run", "stacks", "stages"},
    "inplace": {"ops", "run", "settings", "stacks", "stages", "state"},
    "replay": {"ops"},
    "adam_graph": {"adam", "adaptive", "layers", "ops", "run", "stacks"},
    "held": {"layers", "ops", "settings", "stacks"},
    "graph": {"adam_graph", "held", "ops", "replay", "run", "stacks", "stages"},
    "adam": {"layers", "ops", "settings", "stacks", "state"},
    "adaptive": {"adam", "layers", "ops", "stacks", "state"},
    "updates": {"adam", "adaptive", "exchange", "held", "layers", "ops", "run", "shares", "stacks", "stages"},
    "exchange": {"comm", "ops", "plan"},
    "shares": {"exchange", "layers", "ops", "plan", "refresh", "run", "settings", "stages"},
    "first": {"inplace", "layers", "ops", "run", "shares", "stages"},
    "decomposing": {"conclude", "exchange", "first", "layers", "ops", "run", "shares", "stages", "staleness"},
    "staleness": {"layers", "ops", "reduce", "run", "settings", "shares", "stages", "state"},
    "later": {"layers", "ops", "run", "settings", "shares", "stages", "state"},
    "run": {
        "absorb",
        "adaptive",
        "checkpoint",
        "decomposing",
        "exchange",
        "graph",
        "health",
        "later",
        "layers",
        "notices",
        "ops",
        "overlap",
        "plan",
        "reduce",
        "refresh",
        "renew",
        "crew",
        "settings",
        "shares",
        "stacks",
        "stages",
        "staleness",
        "state",
        "tape",
        "updates",
        "window",
    },
    "report_page": {"plan", "report_page"},
    "report": {"layers", "plan", "run", "settings", "state"},
    "checkpoint": {"layers", "ops", "plan", "settings", "state"},
    "owned": {"layers"},
    "loop": set(),
    "crew": {
        "KFAC",
        "comm",
        "distributed",
        "kfac",
        "layers",
        "plan",
        "reduce",
        "refresh",
        "crew",
        "run",
        "settings",
        "shares",
        "stages",
        "state",
    },
    "quadratic": {"comm", "exact", "exchange", "run", "settings", "trust"},
    "trust": {"comm", "exchange", "layers", "ops", "run"},
    "overlap": {"comm", "exchange", "layers", "reduce", "sums", "tape"},
    "conclude": {"exchange", "plan", "reduce", "run"},
    "absorb": {"ops", "plan", "reduce", "replay", "run", "stacks", "stages", "window"},
    "reduce": {"comm", "exchange", "ops", "plan", "run", "stages", "window"},
    "timing": set(),
    "notices": {"layers"},
    "health": set(),
    "attach": {"comm", "exchange", "layers", "plan", "settings"},
    "profile": {"adam", "comm", "settings"},
    "kfac": ANY,
    "recipes": {"recipes", "KFAC", "Settings", "distributed"},
    "distributed": set(),
    "advice": set(),
    "__init__": {"advice", "distributed", "crew", "kfac", "settings", "trust"},
}
"""First name below dkfac -> the first names it may import; recipes use the public names alone."""


def part(path):
    """``dkfac/ops/factors.py -> ops``, ``dkfac/run.py -> run``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """The dotted names of the modules a file imports, anywhere in it; relative imports count as dkfac's."""
    module = ("dkfac", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module[: -node.level]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            found += [f"{source}.{alias.name}" for alias in node.names] if source == "dkfac" else [source]
            if node.module and not source.startswith("dkfac"):
                found += [f"{source}.{alias.name}" for alias in node.names]
    return found


def test_the_import_table_names_exactly_the_parts_that_exist():
    assert {part(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_the_table_allows(path):
    allowed = MAY_IMPORT[part(path)]
    used = {name.split(".")[1] for name in imports(path) if name.startswith("dkfac.")}
    assert "dkfac" not in imports(path) or part(path) == "recipes"
    if allowed is not ANY:
        assert used <= allowed


def test_imports_are_read_in_all_their_forms(tmp_path, monkeypatch):
    """Positive control of the reader."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "ops" / "x.py"
    file.parent.mkdir()
    file.write_text(
        "import dkfac.run\nfrom dkfac import tape\nfrom dkfac.plan.spec import LayerSpec\n"
        "def f():\n    from ..state import Average\n    from . import rescale\n    import torch.distributed as dist\n"
    )
    found = imports(file)
    for name in ("dkfac.run", "dkfac.tape", "dkfac.plan.spec", "dkfac.state", "dkfac.ops", "torch.distributed"):
        assert name in found, name


def uses_of_distributed(path):
    """Attributes taken from torch.distributed, under whatever name it was imported."""
    tree = ast.parse(path.read_text())
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("torch.distributed")
    }
    aliases |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name == "distributed"
    }
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value) in aliases | {"torch.distributed"})
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {alias.name for alias in node.names}
    return found


def test_only_comm_uses_torch_distributed():
    found = {
        str(path.relative_to(PACKAGE)): uses_of_distributed(path)
        for path in FILES
        if part(path) not in ("comm", "distributed")
    }
    assert found.pop("layers/find.py") == {"DTensor"}, "a class to recognise sharded parameters by, no process group"
    assert {name: used for name, used in found.items() if used} == {}


def test_sub_package_init_files_are_empty():
    found = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert {path.parent.name for path in found} >= {"layers", "ops", "plan"}
    assert [path for path in found if path.read_text().strip()] == []


def test_the_public_names_are_exactly_all():
    found = {name for name, value in vars(dkfac).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in found if not name.startswith("_")} <= set(dkfac.__all__)
    names = {"KFAC", "LevenbergMarquardt", "Settings", "__version__", "detach", "distributed", "roles"}
    names |= {"suggest"}
    assert set(dkfac.__all__) == names
    assert (dkfac.KFAC.__name__, dkfac.Settings.__name__) == ("KFAC", "Settings")


def test_the_version_is_the_projects():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert dkfac.__version__ == project["version"]


PLAN_MODULES = [f"dkfac.plan.{path.stem}" for path in FILES if path.parent.name == "plan" and path.stem != "__init__"]


def in_a_process_without_torch(code):
    blocked = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=60)


def test_torch_is_really_blocked_in_that_process():
    done = in_a_process_without_torch("import torch")
    assert done.returncode == 1
    assert "torch" in done.stderr


@pytest.mark.parametrize("module", PLAN_MODULES)
def test_the_plan_imports_without_torch(module):
    done = in_a_process_without_torch(f"import {module}; print({module}.__name__)")
    assert done.stdout.strip() == module, done.stderr


def test_the_plan_code_uses_nothing_but_the_standard_library():
    """The same for its files alone, whatever dkfac/__init__.py imports."""
    for path in FILES:
        if part(path) == "plan":
            roots = {name.split(".")[0] for name in imports(path)} - {"dkfac"}
            assert roots <= sys.stdlib_module_names, path


def test_files_are_of_readable_length():
    long = {str(path.relative_to(PACKAGE)): n for path in FILES if (n := len(path.read_text().splitlines())) > 350}
    assert long == {}
