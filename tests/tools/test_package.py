"""The wheel and the source distribution, built and installed as a user would, away from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dkfac

ROOT = Path(__file__).parents[2]


def run(*command, **how):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200, **how)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build both from the files that git knows, as they are, and install the wheel in an environment of its own."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    if "pyproject.toml" not in names:
        pytest.skip("not a checkout of git: what belongs to the package is not known")
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source)
    if built.returncode:
        pytest.skip(f"the wheel cannot be built here (no package index?): {built.stderr.strip()[-200:]}")
    (found,) = folder.glob("dkfac-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    done = run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", found)
    assert done.returncode == 0, done.stderr
    return found, python


def test_the_wheel_has_presets_types_licence_and_a_description_without_relative_links(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = archive.namelist()
        about = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"dkfac/py.typed", "dkfac/plan/presets/h200.json"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks", "docs")) for name in names)
    assert "](docs" not in about
    assert "K-FAC for PyTorch" in about


def test_the_installed_command_answers_without_torch(wheel, tmp_path):
    command = wheel[1].parent / "dkfac"
    said = run(command, "--version", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, f"dkfac {dkfac.__version__}\n"), said.stderr
    said = run(command, "plan", "resnet50", "--ranks", "8", "--cluster", "spd-kfac-64", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "recommended" in said.stdout


def test_the_installed_package_trains(wheel, tmp_path):
    code = """
import dkfac, torch
assert "site-packages" in dkfac.__file__ and "env" in dkfac.__file__, dkfac.__file__
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = dkfac.KFAC(model, optimizer)
model(torch.randn(8, 3)).square().mean().backward()
optimizer.step()
assert kfac.metrics()["step"] == 1
"""
    import torch

    # torch and what it needs come from here: last on the path, so that dkfac does not.
    code = f"import sys; sys.path.append({str(Path(torch.__file__).parents[1])!r})\n" + code
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run(wheel[1], "-c", code, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


def test_the_source_distribution_has_documentation_and_benchmarks(tmp_path):
    hatchling = pytest.importorskip("hatchling.build", reason="hatchling is not installed")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        name = hatchling.build_sdist(str(tmp_path))
    finally:
        os.chdir(before)
    with tarfile.open(tmp_path / name) as archive:
        names = {"/".join(member.name.split("/")[1:]) for member in archive}
    assert {"README.md", "LICENSE", "docs/quickstart.md", "benchmarks/one_line.py", "dkfac/py.typed"} <= names
