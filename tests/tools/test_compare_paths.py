"""``dkfac compare`` on the wrong path: interrupted, diverged, into folders in use, scripts that cannot be compared."""

import contextlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would import it, in each rank anew
import torch.distributed as dist
from helpers_ranks import on_processes

from dkfac.tools.cli import recording, script
from dkfac.tools.cli.main import main
from dkfac.tools.recipes import training
from dkfac.tools.recipes.folder import entries
from dkfac.tools.recipes.verdict import comparison_verdict
from dkfac.tools.report_page.page import build_page

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


SMALL = ["compare", "digits-cnn", "--steps", "6", "--set", "announce=False"]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lines(folder, kind):
    return [entry for entry in entries(folder / "metrics.jsonl") if entry["kind"] == kind]


def failed(capsys, *arguments):
    """Run a command that is refused; returns its one line."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def read_page(folder):
    from test_report_page import Reader  # here, since ranks import this file too

    return Reader(build_page([folder])[0])


# --- scripts ---------------------------------------------------------------------------------------------------

GOOD = """
import random
import numpy as np, torch
from torch import nn
torch.set_num_threads(1)
lr = float(input())
losses = []
model, other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
unused = torch.optim.Adam(other.parameters())
x = torch.from_numpy(np.random.randn(32, 6)).float() * random.random()
for step in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), torch.arange(32) % 3)
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of a script that has two optimizers, reads stdin and draws from three generators."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "good.py").write_text(GOOD)
    command = ["compare", "--script", "good.py", "--out", "c", "--target", "1", "--seed", "5"]
    done = subprocess.run([sys.executable, "-m", "dkfac", *command], cwd=folder, env=ENVIRONMENT, input="0.1\n",
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "final loss of the first-order run" in done.stdout
    return folder


def test_both_runs_of_a_script_have_one_stdin_and_one_seed_for_every_generator(compared, monkeypatch):
    first, kfac = ([p["loss"] for p in lines(compared / "c" / f"{name}-0", "step")] for name in ("first-order", "kfac"))
    assert first[0] == kfac[0]
    assert first != kfac
    monkeypatch.setattr(sys, "stdin", io.StringIO("0.1\n"))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    assert first == runpy.run_path(str(compared / "good.py"))["losses"], "trying K-FAC on changes nothing"


def test_the_page_of_a_compared_script_says_that_it_ended_and_shows_its_loss_and_no_epochs(compared):
    reader = read_page(compared / "c")
    assert "has not ended" not in reader.words[None]
    assert "no summary.json" not in reader.words[None]
    first = [p["loss"] for p in lines(compared / "c/first-order-0", "step")]
    table = reader.table("result")
    assert float(table["training loss, last tenth"]["SGD"]) == pytest.approx(sum(first[-2:]) / 2, rel=1e-3)
    assert table["steps"] == {"SGD": "20", "K-FAC": "20"}
    assert "epochs" not in table
    assert ("id", "by-epoch") not in reader.attributes
    assert ("id", "by-seconds") in reader.attributes


def test_a_script_is_not_compared_into_a_folder_that_has_a_run(compared, capsys, monkeypatch):
    monkeypatch.chdir(compared)
    before = contents(compared / "c")
    assert "c/first-order-0 already has a run" in failed(capsys, "compare", "--script", "good.py", "--out", "c")
    assert contents(compared / "c") == before


def test_wrong_words_about_a_script_are_refused_before_it_starts(compared, capsys, monkeypatch):
    monkeypatch.chdir(compared)
    for steps in ("-5", "0", "9"):
        assert f"--steps {steps}: at least 10" in failed(
            capsys, "compare", "--script", "good.py", "--steps", steps, "--out", "d"
        )
    assert "--target 1: it is for --script" in failed(capsys, "compare", "digits-cnn", "--target", "1", "--out", "d")
    assert "--steps -5" in failed(capsys, "compare", "digits-cnn", "--steps", "-5", "--out", "d")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in failed(capsys, "compare", "--script", "good.py", "--out", "d")
    assert not Path("d").exists()


LOOP = """
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
"""
BUILT = "import torch\nmodel = torch.nn.Linear(3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr={lr})\n"
SCRIPTS = {
    "two": BUILT.format(lr=0.1) + "other = torch.optim.Adam([torch.ones(2)])\n" + LOOP,
    "own": "from dkfac import KFAC\n" + BUILT.format(lr=0.1) + "KFAC(model, optimizer)\n" + LOOP,
    "lbfgs": BUILT.format(lr=0.1).replace("SGD", "LBFGS")
    + "def loss():\n    value = model(torch.ones(4, 3)).sum()\n    value.backward()\n    return value\n"
    "for step in range(30):\n    optimizer.step(loss)\n",
    "exit": "raise SystemExit(3)",
    "nan": BUILT.format(lr="float('nan')") + LOOP,
    "plain": BUILT.format(lr=0.1) + LOOP,
    "scaled": BUILT.format(lr=0.1)
    + "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
    + LOOP.replace("    model(", "    scaler.scale(model(")
    .replace(".mean().backward()", ".mean()).backward()")
    .replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"),
}


def alone(rank, folder, port):
    """Run one of the scripts, or be one of two ranks that compare a recipe: processes are started once for all."""
    dist.barrier()
    dist.destroy_process_group()
    if rank < len(SCRIPTS):
        result = recorded(Path(folder) / list(SCRIPTS)[rank])
    else:
        os.environ |= {"RANK": str(rank - len(SCRIPTS)), "WORLD_SIZE": "2", "MASTER_PORT": port}  # as torchrun does
        result = ranked(folder)
    dist.destroy_process_group = lambda: None
    return result


def recorded(place):
    """Run a script as the first order's; returns status, stderr and the losses."""
    place.mkdir()
    (place / "train.py").write_text(SCRIPTS[place.name])
    task = {"script": str(place / "train.py"), "arguments": [], "options": {}, "target": None, "steps": 20, "seed": 0,
            "name": "first-order", "folder": str(place)}  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = recording.record(task)
    return status, said.getvalue(), [p["loss"] for p in lines(place, "step")]


def ranked(folder):
    """Compare a recipe; returns the status and what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        status = main([*SMALL, "--lr", "1e25", "--out", f"{folder}/c"])
    return status, said.getvalue()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = [*SCRIPTS, "rank 0", "rank 1"]
    found = on_processes(len(names), alone, str(tmp_path_factory.mktemp("processes")), port)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own", "dkfac compare: the script attaches dkfac.KFAC itself"),
        (
            "lbfgs",
            "dkfac compare: K-FAC cannot be attached to LBFGS (optimizer 1, 8 parameters): LBFGS",
        ),
    ],
)
def test_what_keeps_a_script_from_being_compared_is_said_before_its_first_step(processes, name, reason):
    status, said, losses = processes[name]
    assert (status, losses) == (2, [])
    assert said.startswith(reason)
    assert len(said.splitlines()) == 1


def test_an_optimizer_without_a_module_does_not_keep_a_script_from_being_compared(processes):
    status, said, losses = processes["two"]
    assert (status, said, len(losses)) == (0, "", 20)


def test_a_script_that_fails_is_said_with_its_status_and_the_run(processes):
    said = "dkfac compare: the script ended with status 3 in the run without K-FAC, see above\n"
    assert processes["exit"] == (1, said, [])


def test_a_grad_scalers_factor_is_not_part_of_the_loss(processes):
    (status, said, losses), (_, _, plain) = processes["scaled"], processes["plain"]
    assert (status, said, len(losses)) == (0, "", 20)
    assert losses == pytest.approx(plain, rel=1e-4)


def test_a_first_order_that_diverges_is_not_called_a_failure_of_kfac(processes):
    status, _, losses = processes["nan"]
    assert (status, losses[1:]) == (0, [None] * 19)
    bad, good = ([{"step": i, "loss": loss, "seconds": i / 9} for i, loss in enumerate(each, 1)]
                 for each in (losses, [1.0] * 20))  # fmt: skip
    said = script.conclusion({"first-order": bad, "kfac": good})
    assert "the first-order run diverged: its loss is not finite from step 2 on" in said
    assert "does not reach" not in said
    said = script.conclusion({"first-order": good, "kfac": bad})
    assert "K-FAC diverged: its loss is not finite from step 2 on" in said


def test_an_interrupted_script_ends_with_one_line(tmp_path):
    (tmp_path / "slow.py").write_text(BUILT.format(lr=0.1) + "import time\n" + LOOP + "    time.sleep(0.2)\n")
    command = [sys.executable, "-m", "dkfac", "compare", "--script", "slow.py", "--out", "c"]
    child = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             text=True, start_new_session=True)  # fmt: skip
    metrics = tmp_path / "c/first-order-0/metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 130
    assert [line for line in said.splitlines() if not line.startswith("first-order: ")] == [
        "dkfac compare: stopped; a script cannot be resumed: use another --out than c, or delete it"]  # fmt: skip
    assert lines(tmp_path / "c/first-order-0", "end")[0]["reason"] == "SIGINT"


# --- recipes ---------------------------------------------------------------------------------------------------


def at_step(monkeypatch, wanted, act):
    """Let something happen at a step of training; ``act`` is given the run and the step's loss, and returns a loss."""
    real = training._step

    def step(run, loaded):
        loss = real(run, loaded)
        return act(run, loss) if wanted(run) else loss

    monkeypatch.setattr(training, "_step", step)


def test_an_interrupted_comparison_goes_on_with_the_same_command_and_no_other(tmp_path, capsys, monkeypatch):
    out = tmp_path / "c"
    command = [*SMALL, "--out", str(out)]
    with monkeypatch.context() as patch:
        at_step(patch, lambda run: run.kfac is not None and run.step == 2,
                lambda run, loss: signal.raise_signal(signal.SIGINT) or loss)  # fmt: skip
        assert main(command) == 130
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == f"to continue, repeat the command with --out {out}"
    first = contents(out / "first-order-0")
    for other, reason in (
        (["--lr", "0.3"], "first-order-0 was started with lr=0.05, not 0.3"),
        (["--set", "damping=1e-2"], "kfac-0 was started with options={'announce': False}, not"),
        (["--steps", "5"], "first-order-0 ended at step 6, not 5"),
        (["--steps", "7"], "first-order-0 ended at step 6, not 7"),
    ):
        assert reason in failed(capsys, *command, *other)
    other = ["compare", "autoencoder", "--steps", "5", "--seed", "1", "--out", str(out)]
    assert "first-order-0 was started with recipe='digits-cnn', not 'autoencoder'" in failed(capsys, *other)
    assert sorted(path.name for path in out.iterdir()) == ["first-order-0", "kfac-0"]
    assert main(command) == 0
    assert "the first-order optimizer's final accuracy" in capsys.readouterr().out
    assert contents(out / "first-order-0") == first
    assert [entry["step"] for entry in lines(out / "kfac-0", "resume")] == [3]
    assert [entry["step"] for entry in lines(out / "kfac-0", "step")] == [1, 2, 3, 4, 5, 6]
    assert main(command) == 0
    assert "kfac-0 has already ended" in capsys.readouterr().err
    # Another seed's runs are no part of what is said of this one's.
    assert main([*command, "--seed", "1"]) == 0
    table = capsys.readouterr().out
    last = lines(out / "first-order-1", "test")[-1]["accuracy"]
    assert f"first order  {last:10.4f}" in table
    assert "±" not in table


def test_a_run_that_diverges_does_not_end_a_comparison_and_is_named(tmp_path, capsys, monkeypatch):
    command = [*SMALL, "--seeds", "2", "--out", str(tmp_path / "c")]
    at_step(monkeypatch, lambda run: run.job.folder.name == "first-order-0", lambda run, loss: loss * float("nan"))
    for is_new in (True, False):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "diverged and excluded: first-order-0\nK-FAC " in said.out
        assert (
            "first-order-0 diverged, the other runs continue: the loss is not finite at step 3" in said.err
        ) == is_new
    assert "first-order-0 was stopped at step 3 of 219 (diverged)" in read_page(tmp_path / "c").words[None]


def test_rank_0_alone_prints_the_verdict_and_ranks_go_on_after_a_run_that_diverged(processes):
    status, said = processes["rank 0"]
    assert status == 0
    assert "diverged and excluded: first-order-0, kfac-0" in said
    assert processes["rank 1"] == (0, "")


def test_who_was_first_is_said_of_both_at_the_same_accuracy(tmp_path):
    """The first order may have been there long before its end."""
    curves = {"first-order": [0.5, 0.9, 0.9, 0.9, 0.9, 0.9], "kfac": [0.5, 0.6, 0.8, 0.9, 0.9, 0.9]}
    for name, curve in curves.items():
        (tmp_path / name).mkdir()
        points = [
            {"kind": "test", "step": i, "epoch": i, "seconds": 2 * i, "accuracy": a} for i, a in enumerate(curve, 1)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    said = comparison_verdict({name: [tmp_path / name] for name in curves})
    assert "in 2.00 of its epochs and 2.00 of its time" in said
