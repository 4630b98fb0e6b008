"""``dkfac run``: scripts that know nothing of K-FAC, run as a user would."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dkfac.tools.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "unmodified"
EPOCHS = "4"


def start(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=180, env=environment
    )


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script in this process; returns its status, and what it said."""

    def inside(*arguments):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        monkeypatch.chdir(ROOT)
        try:
            status = main(["run", *map(str, arguments)])
        except SystemExit as end:
            status = 1 if isinstance(end.code, str) else end.code
            print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
        except Exception as error:
            status = 1
            print(f"Traceback {type(error).__name__}: {error}", file=sys.stderr)
        said = capsys.readouterr()
        return types.SimpleNamespace(returncode=status, stdout=said.out, stderr=said.err)

    return inside


def ranks(*command):
    return ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *command)


def last_line(result):
    return [float(number) for number in re.findall(r"\d+\.\d+", result.stdout.splitlines()[-1])]


def test_there_are_three_scripts_and_none_knows_of_kfac():
    paths = sorted(SCRIPTS.glob("*.py"))
    assert [path.name for path in paths] == ["amp_accumulation.py", "ddp.py", "plain.py"]
    assert not any(re.search("dkfac|k-fac", path.read_text(), re.IGNORECASE) for path in paths)


@pytest.mark.parametrize(
    ("name", "options", "optimizer"),
    [
        ("plain.py", ["--damping", "1e-3"], "SGD"),
        pytest.param("amp_accumulation.py", ["--set", "accumulate=mean"], "SGD", marks=pytest.mark.slow),
        ("ddp.py", ["--strategy", "sharded"], "AdamW"),
    ],
)
def test_a_script_trains_through_it(name, options, optimizer):
    own = ("-m", "dkfac", "run", *options, SCRIPTS / name, EPOCHS)
    result = start(*(ranks(*own) if name == "ddp.py" else own))
    assert result.returncode == 0, result.stderr
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("dkfac: ")]
    assert f"for {optimizer}" in said
    if name == "ddp.py":
        assert "strategy sharded on 2 ranks" in said
    assert "Warning" not in result.stderr
    without = start(*(ranks() if name == "ddp.py" else ()), SCRIPTS / name, EPOCHS)
    assert without.returncode == 0, without.stderr
    (_, accuracy), (_, accuracy_without) = last_line(result), last_line(without)
    assert result.stdout != without.stdout
    assert accuracy > 0.8
    assert accuracy > accuracy_without - 0.05


TWO = """
import sys, torch
from torch import nn
class Painter(nn.Linear): pass
class Critic(nn.Linear): pass
first, second = Painter(3, 3), Critic(3, 1)
one, two = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.1)
for _ in range(3):
    one.zero_grad(); two.zero_grad()
    second(first(torch.randn(8, 3))).mean().backward()
    one.step(); two.step()
print("done", sys.argv[1:], __name__)
"""


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(TWO)
    return path


def test_several_optimizers_are_listed_and_nothing_is_trained_by_chance(two, run):
    result = run(two)
    assert result.returncode == 1
    assert "the script has 2 optimizers" in result.stderr
    assert "--target 1  SGD with 12 parameters" in result.stderr
    assert "--target 2  Adam with 4 parameters" in result.stderr
    assert "done" not in result.stdout


@pytest.mark.parametrize(
    ("target", "optimizer"), [("1", "SGD"), ("Adam", "Adam"), ("Critic", "Adam"), ("Painter", "SGD")]
)
def test_a_target_chooses_by_number_optimizer_or_model(two, target, optimizer, run):
    result = run("--target", target, two, "--own", "arguments")
    assert result.returncode == 0, result.stderr
    assert f"for {optimizer} " in result.stderr
    assert "done ['--own', 'arguments'] __main__" in result.stdout


def test_a_target_that_is_not_there_is_named_after_the_script(two, run):
    result = run("--target", "Sculptor", two)
    assert result.returncode == 3
    assert "K-FAC was not attached: no trained module or optimizer matches --target Sculptor" in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('no training')", "built no torch.optim optimizer"),
        (
            "import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), lr=1)\n"
            "m.weight.sum().backward()\no.step()",
            "was called while it was training",
        ),
    ],
)
def test_a_script_that_offers_nothing_to_attach_to_says_so(tmp_path, text, reason, run):
    path = tmp_path / "nothing.py"
    path.write_text(text)
    result = run(path)
    assert result.returncode == 3
    assert reason in result.stderr


def test_the_scripts_own_failure_and_status_are_its_own(tmp_path, run):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(7)")
    assert run(path).returncode == 7
    for error in ("KeyError", "ValueError", "FileNotFoundError"):
        path.write_text(f"raise {error}('mine')")
        result = run(path)
        assert result.returncode == 1
        assert f"{error}: " in result.stderr
        assert "Traceback" in result.stderr


def test_a_script_that_ends_with_sys_exit_is_told_too(tmp_path, run):
    path = tmp_path / "ends.py"
    path.write_text(
        "import os, sys\nos.chdir('/')\nimport pathlib\nassert pathlib.Path(__file__).read_text()\nsys.exit(0)"
    )
    result = run(path)
    assert result.returncode == 3
    assert "K-FAC was not attached" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--set", "dampening=1", "{script}"], "no such setting"),
        (["--set", "damping", "{script}"], "NAME=VALUE"),
        (["--set", "damping=-1", "{script}"], "damping=-1"),
    ],
)
def test_wrong_input_is_refused_before_the_script_starts(two, arguments, message, run):
    result = run(*(str(two) if a == "{script}" else a for a in arguments))
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
