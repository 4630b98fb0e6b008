"""``dkfac run``: scripts that know nothing of K-FAC, run as a user would."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dkfac.runtime.engine import Engine
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


def test_every_optimizer_gets_its_kfac(two, run):
    result = run(two)
    assert result.returncode == 0, result.stderr
    assert "1 layers with 100.0% of the parameters preconditioned, for SGD " in result.stderr
    assert "1 layers with 100.0% of the parameters preconditioned, for Adam " in result.stderr
    assert "done" in result.stdout


@pytest.mark.parametrize(
    ("target", "optimizer"), [("1", "SGD"), ("Adam", "Adam"), ("Critic", "Adam"), ("Painter", "SGD")]
)
def test_a_target_chooses_by_number_optimizer_or_model(two, target, optimizer, run):
    result = run("--target", target, two, "--own", "arguments")
    assert result.returncode == 0, result.stderr
    assert f"for {optimizer} " in result.stderr
    assert result.stderr.count("dkfac: ") == 1
    assert "done ['--own', 'arguments'] __main__" in result.stdout


def test_a_target_that_is_not_there_is_named_after_the_script(two, run):
    result = run("--target", "Sculptor", two)
    assert result.returncode == 0
    assert "done" in result.stdout
    assert run("--strict", "--target", "Sculptor", two).returncode == 3
    assert "K-FAC was not attached: no trained module or optimizer matches --target Sculptor" in result.stderr


NO_MODULE = """
import torch
m = torch.nn.Linear(2, 2)
o = torch.optim.SGD(m.parameters(), lr=1)
for step in range(2):
    m.weight.sum().backward()
    o.step()
    print("step", step)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [("print('no training')", "built no torch.optim optimizer"), (NO_MODULE, "was called before its step")],
)
def test_a_script_that_offers_nothing_to_attach_to_says_so_and_ends_as_it_would(tmp_path, text, reason, run):
    path = tmp_path / "nothing.py"
    path.write_text(text)
    result = run(path)
    assert result.returncode == 0
    assert result.stderr.count(reason) == 1
    assert result.stdout
    strict = run("--strict", path)
    assert strict.returncode == 3
    assert reason in strict.stderr
    assert "step 0" not in strict.stdout  # before training starts


TUPLE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.two(self.one(x)), x
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3))[0].square().mean().backward()
    optimizer.step()
    print("step", step, len(model.one._forward_hooks))
"""


def test_an_error_of_kfac_in_a_forward_switches_it_off_and_the_script_goes_on(tmp_path, run):
    path = tmp_path / "returns_two.py"
    path.write_text(TUPLE)
    exact = ("--set", "fisher=exact", "--set", "fisher_loss=cross-entropy")
    result = run(*exact, path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["step 0 1", "step 1 0", "step 2 0"]  # closed at the next forward
    assert result.stderr.count("need a model that returns one tensor, not tuple. The optimizer goes on") == 1
    strict = run("--strict", *exact, path)
    assert strict.returncode == 1
    assert "TypeError" in strict.stderr
    assert "step" not in strict.stdout


def test_an_error_in_a_step_of_kfac_switches_it_off_and_the_script_goes_on(two, run, monkeypatch):
    take_step = Engine.take_step

    def fails(engine, *args):
        if engine.step == 1:
            raise RuntimeError("out of luck")
        return take_step(engine, *args)

    monkeypatch.setattr(Engine, "take_step", fails)
    result = run(two)
    assert result.returncode == 0, result.stderr
    assert "done" in result.stdout
    assert result.stderr.count("K-FAC is switched off after 2 steps: out of luck. The optimizer goes on") == 2


CLOSURE = """
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    return loss
for step in range(3):
    optimizer.step(closure)
    print(len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks))
"""


def test_a_step_with_a_closure_is_kfacs_from_the_first_on(tmp_path, run, monkeypatch):
    steps = []
    take_step = Engine.take_step
    monkeypatch.setattr(Engine, "take_step", lambda engine, *args: (steps.append(1), take_step(engine, *args))[1])
    path = tmp_path / "closure.py"
    path.write_text(CLOSURE)
    result = run(path)
    assert result.returncode == 0, result.stderr
    assert len(steps) == 3


ODD_CALLS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 3)
torch.jit.trace(model, x)
with FakeTensorMode(allow_non_fake_inputs=True):
    model(torch.ones(4, 3))
torch.func.grad(lambda x: model(x).sum())(x)
torch.func.vmap(model)(x)
print("hooks", sum(len(m._forward_hooks) for m in model.modules()))
optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
print("hooks", sum(len(m._forward_hooks) for m in model.modules()))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_does_not_attach_in_a_call_that_is_traced_transformed_or_for_shapes(tmp_path, run):
    path = tmp_path / "odd.py"
    path.write_text(ODD_CALLS)
    result = run(path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["hooks", "0", "hooks", "3"]
    assert result.stderr.count("dkfac: 2 layers with 100.0%") == 1


def test_a_fold_that_is_over_is_freed(tmp_path, run):
    path = tmp_path / "folds.py"
    path.write_text(FOLDS)
    result = run(path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("dkfac: ") == 3
    assert result.stdout.split() == ["alive", "1"]


CHILDREN = """
import multiprocessing, sys
import torch
class Trainer(multiprocessing.Process):  # without a target
    def run(self):
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad(); model(torch.ones(2, 3)).mean().backward(); optimizer.step()
        print("trained", flush=True)
class Forked(Trainer):
    _start_method = "fork"
    @staticmethod
    def _Popen(process):
        return multiprocessing.get_context("fork").Process._Popen(process)
class Spawned(Trainer):
    @staticmethod
    def _Popen(process):
        return multiprocessing.get_context("spawn").Process._Popen(process)
if __name__ == "__main__":
    for kind in (Forked, Spawned):
        child = kind(); child.start(); child.join(); assert child.exitcode == 0
"""


def test_children_that_train_get_their_kfac_whether_forked_or_spawned(tmp_path):
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    result = start("-m", "dkfac", "run", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["trained", "trained"]
    assert result.stderr.count("dkfac: 1 layers with 100.0% of the parameters") == 2
    assert "not attached" not in result.stderr


FOLDS = """
import gc, weakref, torch
models = []
for fold in range(3):
    model = torch.nn.Linear(3, 3)
    models.append(weakref.ref(model))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad(); model(torch.ones(2, 3)).mean().backward(); optimizer.step()
gc.collect()
print("alive", sum(m() is not None for m in models))
"""


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
    assert result.returncode == 0
    assert "K-FAC was not attached" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["-m", "no_such_package.train"], "there is no module no_such_package.train"),
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
