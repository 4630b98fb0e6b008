"""The shape of the package: who may import whom, what is public, what needs torch."""

import ast
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import conftest
import pytest

import dkfac

PACKAGE = Path(dkfac.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ANY = None

LEVELS = (
    ("ops", "plan", "config"),
    ("layers", "comm"),
    ("capture",),
    ("factors",),
    ("decompose",),
    ("precondition",),
    ("state", "workers", "experimental"),
    ("runtime",),
    ("kfac",),
    ("integrations",),
    ("tools",),
)
"""A package may import itself and what stands above it in this list."""

APART = {"ops": {"ops"}, "plan": {"plan"}, "config": {"config"}, "comm": {"comm", "ops", "plan"}}
"""Packages that import less than their place allows."""

TOP = {"__init__", "__main__", "distributed"}
"""Modules beside the packages: the public names, ``python -m dkfac``, and how to join torchrun's ranks."""


def may_import(package):
    if package in TOP | {"tools"}:
        return ANY
    place = next(i for i, names in enumerate(LEVELS) if package in names)
    return APART.get(package) or {package, "distributed", *(name for names in LEVELS[:place] for name in names)}


def table():
    """The packages in order, as ``docs/architecture.md`` has them."""
    rows = ["| package | what it is | imports |", "|---|---|---|"]
    for package in (name for names in LEVELS for name in names):
        allowed = may_import(package)
        said = "anything" if allowed is ANY else ", ".join(sorted(allowed - {package, "distributed"})) or "nothing"
        where = PACKAGE / package / "__init__.py"
        about = ast.get_docstring(ast.parse((where if where.exists() else PACKAGE / f"{package}.py").read_text()))
        rows.append(f"| `{package}{'/' if where.exists() else '.py'}` | {' '.join(about.split())} | {said} |")
    return "\n".join(rows)


DOCS = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- written by tests/test_layout.py: begin -->", "<!-- written by tests/test_layout.py: end -->"


def test_the_documentation_has_the_import_table():
    """Written by ``python tests/test_layout.py``."""
    text = DOCS.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == table()


def part(path):
    """``dkfac/ops/factors.py -> ops``, ``dkfac/runtime/engine.py -> run``."""
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
    assert {part(path) for path in FILES} == TOP | {name for names in LEVELS for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_stands_above_it(path):
    allowed = may_import(part(path))
    used = {name.split(".")[1] for name in imports(path) if name.startswith("dkfac.")}
    assert "dkfac" not in imports(path) or part(path) == "tools"
    if allowed is not ANY:
        assert used - allowed == set()


def test_recipes_use_the_public_names_alone():
    for path in sorted((PACKAGE / "tools" / "recipes").rglob("*.py")):
        used = [name for name in imports(path) if name.startswith("dkfac")]
        own = [name for name in used if not name.startswith("dkfac.tools.recipes")]
        assert {name.removeprefix("dkfac.") for name in own} <= {"dkfac", "KFAC", "Settings", "distributed"}, path


def test_imports_are_read_in_all_their_forms(tmp_path, monkeypatch):
    """Positive control of the reader."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "ops" / "x.py"
    file.parent.mkdir()
    file.write_text(
        "import dkfac.runtime\nfrom dkfac import kfac\nfrom dkfac.plan.spec import LayerSpec\n"
        "def f():\n    from ..state import checkpoint\n    from . import rescale\n    import torch.distributed as d\n"
    )
    found = imports(file)
    for name in ("dkfac.runtime", "dkfac.kfac", "dkfac.plan.spec", "dkfac.state", "dkfac.ops", "torch.distributed"):
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
    assert {name: used for name, used in found.items() if used} == {}


def test_sub_package_init_files_have_a_docstring_at_most():
    found = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert {path.parent.name for path in found} >= {"layers", "ops", "plan"}
    for path in found:
        body = ast.parse(path.read_text()).body
        assert body == [] or (len(body) == 1 and isinstance(body[0], ast.Expr)), path


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


def test_the_quick_tier_has_tests_of_every_package():
    """``./run test --quick`` promises it; ``conftest.py`` says what is left out and what of that is kept."""
    kept, found, absent = {name.partition("[")[0] for name in conftest.KEPT}, set(), []
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        package, quick = init.parent.name, False
        for path in (conftest.HERE / package).glob("test_*.py"):
            own = kept & {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            found |= own
            quick = quick or bool(own) or f"{package}/{path.stem}" not in conftest.LONG
        if not quick:
            absent.append(package)
    assert absent == []
    golden = ast.parse((conftest.HERE / "golden" / "test_golden.py").read_text()).body
    assert kept == found | (kept & {node.name for node in golden if isinstance(node, ast.FunctionDef)})


if __name__ == "__main__":
    text = DOCS.read_text()
    DOCS.write_text(text[: text.index(BEGIN) + len(BEGIN)] + "\n" + table() + "\n" + text[text.index(END) :])
