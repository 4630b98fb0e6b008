"""Shapes of training script (tests/scripts), each run unmodified through ``dkfac run`` and with the one line."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers_scripts import Forks

SCRIPTS = Path(__file__).parents[1] / "scripts"
ONE_LINE = "# (the one line)"
KFAC = '__import__("dkfac").KFAC'


@dataclass(frozen=True)
class Shape:
    """What is expected of a script."""

    name: str
    shares: tuple[float, ...] = (100.0,)
    """Percent of each optimizer's parameters that K-FAC preconditions, in the order of attaching."""
    line: str | None = f"{KFAC}(model, optimizer)"
    """The one line; None: there is no natural place for it."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    status: int = 0
    says: str | None = None
    """What ``dkfac run`` says besides."""
    launch: tuple[str, ...] = ()
    slow_line: bool = False


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
SHAPES = [
    Shape("plain_sgd"),
    Shape("plain_adamw"),
    Shape("epochs_eval", shares=(96.7,)),
    Shape("closure"),
    Shape("accumulation", options=("--set", "accumulate=mean"), line=f'{KFAC}(model, optimizer, accumulate="mean")'),
    Shape("scaler"),
    Shape("autocast_bf16", shares=(82.1,)),
    Shape("clipping"),
    Shape("schedulers"),
    Shape("param_groups", shares=(96.5,)),
    Shape("folds", shares=(100.0, 100.0, 100.0)),
    Shape("phases", shares=(100.0, 100.0), line=f'__import__("dkfac").detach(model); {KFAC}(model, optimizer)',
          says="K-FAC follows it"),
    Shape("switch", shares=(100.0, 100.0), line=None, says="K-FAC follows it"),
    Shape("gan", shares=(100.0, 100.0), options=("--set", "accumulate=sum"),
          line=f'[{KFAC}(discriminator, optimizer_d, accumulate="sum"), {KFAC}(generator, optimizer_g)]'),
    Shape("actor_critic", line=f"{KFAC}(agent, optimizer)"),
    Shape("separate_modules", line=f"{KFAC}(nn.ModuleList([encoder, decoder]), optimizer)"),
    Shape("two_optimizers", says="K-FAC cannot be attached to Adam (optimizer 2, 1 parameters): no module"),
    Shape("vae"),
    Shape("lstm_lm", shares=(23.3,), options=("--set", "batch_dim=1"), line=f"{KFAC}(model, optimizer, batch_dim=1)"),
    Shape("nanogpt", shares=(94.0,), arguments=("12",)),
    Shape("siamese"),
    Shape("compiled"),
    Shape("checkpointing"),
    Shape("ddp", launch=TORCHRUN, slow_line=True),
    Shape("spawn_ddp", slow_line=True),
    Shape("data_parallel"),
    Shape("package.train", arguments=("--rate", "0.1")),
    Shape("lr_finder", shares=(100.0, 100.0), line=f'__import__("dkfac").detach(model); {KFAC}(model, optimizer)',
          says="K-FAC follows it"),
    Shape("ema"),
    Shape("gradient_penalty"),
    Shape("workers"),
    Shape("exits", status=7),
    Shape("lbfgs", shares=(), line=None, says="LBFGS evaluates the loss several times per step"),
]  # fmt: skip


@pytest.fixture(scope="module")
def forks():
    found = Forks()
    yield found
    found.close()


def command_of(shape, *, through_run):
    """The command line of Python that runs a script."""
    script = ["-m", shape.name] if "." in shape.name else [f"{shape.name}.py"]
    dkfac = ["-m", "dkfac", "run", *shape.options] if through_run else []
    return [*shape.launch, *dkfac, *script, *shape.arguments]


def check(shape, result, shares):
    assert result.returncode == shape.status, result.stderr
    first, last = map(float, re.search(r"^loss (\S+) (\S+)$", result.stdout, re.MULTILINE).groups())
    assert last < first
    said = re.findall(r"^dkfac: \d+ layers with (\S+)% of the parameters", result.stderr, re.MULTILINE)
    assert tuple(map(float, said)) == shares, result.stderr
    assert "switched off" not in result.stderr
    assert "Traceback" not in result.stderr


def copied(shape, folder, line=None):
    """Copy the script; with the one line in it if it is given."""
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if line is not None:
        path = folder / f"{shape.name.replace('.', '/')}.py"
        text = path.read_text()
        assert text.count(ONE_LINE) == 1
        path.write_text(text.replace(ONE_LINE, line))


def marked(shapes, *, with_line):
    found = []
    for shape in shapes:
        marks = [pytest.mark.slow] if with_line and shape.slow_line else []
        found.append(pytest.param(shape, id=shape.name, marks=marks))
    return found


def test_the_scripts_know_nothing_of_kfac_and_all_are_in_the_table():
    paths = [path for path in SCRIPTS.rglob("*.py") if path.stem not in ("__init__", "model")]
    names = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts) for path in paths}
    assert names == {shape.name for shape in SHAPES}
    assert len(names) >= 24
    assert not [path for path in paths if re.search("dkfac|k-fac", path.read_text(), re.IGNORECASE)]


@pytest.mark.parametrize("shape", marked(SHAPES, with_line=False))
def test_an_unmodified_script_trains_through_dkfac_run(shape, forks, tmp_path):
    copied(shape, tmp_path)
    result = forks.run(tmp_path, *command_of(shape, through_run=True))
    check(shape, result, shape.shares)
    own = [line for line in result.stderr.splitlines() if line.startswith("dkfac run: ")]
    assert (shape.says is not None) == bool(own), result.stderr
    assert shape.says is None or shape.says in result.stderr
    assert "stepped parameters that K-FAC preconditions for another" not in result.stderr  # it follows instead


@pytest.mark.parametrize("shape", marked([s for s in SHAPES if s.line is not None], with_line=True))
def test_a_script_trains_with_the_one_line(shape, forks, tmp_path):
    copied(shape, tmp_path, shape.line)
    result = forks.run(tmp_path, *command_of(shape, through_run=False))
    check(shape, result, shape.shares[-1:] if shape.name == "lr_finder" else shape.shares)


def test_a_script_that_resumes_ends_bitwise_where_an_uninterrupted_one_does(forks, tmp_path):
    for name in ("whole", "parts", "beside", "without"):
        copied(None, tmp_path / name)
    run = ("-m", "dkfac", "run", "--save", "nanogpt.py")
    assert forks.run(tmp_path / "whole", *run, "16").returncode == 0
    assert forks.run(tmp_path / "parts", *run, "7").returncode == 0
    assert (tmp_path / "parts" / "ckpt.pt.dkfac").exists()
    saved = torch.load(tmp_path / "parts" / "ckpt.pt", weights_only=False)
    torch.save(saved, tmp_path / "beside" / "ckpt.pt")  # the optimizer's state has K-FAC's too
    for entry in saved["optimizer"]["state"].values():
        for key in [key for key in entry if str(key).startswith("dkfac/")]:
            del entry[key]
    torch.save(saved, tmp_path / "without" / "ckpt.pt")
    resumed = forks.run(tmp_path / "parts", *run, "16", "resume")
    assert resumed.returncode == 0, resumed.stderr
    anew = forks.run(tmp_path / "without", *run, "16", "resume")
    assert anew.returncode == 0
    assert "there is no ckpt.pt.dkfac, so K-FAC's statistics start anew" in anew.stderr
    beside = forks.run(tmp_path / "beside", *run, "16", "resume")
    assert beside.returncode == 0
    assert "start anew" not in beside.stderr
    names = ("whole", "parts", "beside", "without")
    whole, parts, beside, without = (torch.load(tmp_path / name / "ckpt.pt")["model"] for name in names)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(torch.equal(whole[name], beside[name]) for name in whole)
    assert not all(torch.equal(whole[name], without[name]) for name in whole)  # the statistics matter
    assert not [path.name for path in (tmp_path / "parts").glob("*.tmp")]
