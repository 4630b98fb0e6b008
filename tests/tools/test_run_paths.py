"""Runs on the wrong path: full disks, wrong resumes, folders in use, losses that are not finite, signals."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes, on_threads
from test_recipes import ALONE, QUIET, failed, job, lines

import dkfac
from dkfac.tools.cli.main import main
from dkfac.tools.recipes import checkpoints, signals, training
from dkfac.tools.recipes.signals import Signals
from dkfac.tools.recipes.tensors import Tensors
from dkfac.tools.recipes.training import train_recipe


def test_a_disk_that_is_full_does_not_end_a_run_but_is_its_status(tmp_path):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))  # no checkpoint fits, and soon no log

    command = [sys.executable, "-m", "dkfac", "train", "digits-cnn", "--steps", "60", "--save-every", "20"]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=100,
                          preexec_fn=fill, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 1, done.stderr
    for step in (20, 40, 60):
        assert f"no checkpoint at step {step} (" in done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert f"ended at step 60, but its weights are not saved: {tmp_path}/run/checkpoints could not be" in done.stderr
    assert "there is no checkpoint; make room there and resume the run" in done.stderr
    assert f"to continue: dkfac train digits-cnn --resume {tmp_path}/run" in done.stderr
    assert not list((tmp_path / "run/checkpoints").iterdir())


def refuse(monkeypatch, where):
    """Let a call fail for what lies below ``checkpoints``, as on a disk without room."""
    call = getattr(os, where)

    def no_room(what, *rest):
        if "checkpoints" in (os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(what, *rest)

    monkeypatch.setattr(os, where, no_room)


def fill_up(folder, place, monkeypatch, where, is_full=True):
    """There is room for the checkpoint of step 3, and on a full disk none for that of step 6."""
    said = []
    assert train_recipe(job("digits-cnn", folder, max_steps=3, save_every=3), place) == "done"
    before = contents(folder)
    if is_full:
        refuse(monkeypatch, where)
    assert train_recipe(job("digits-cnn", folder, max_steps=6, resume=True), place, said.append) == "unsaved"
    monkeypatch.undo()
    return contents(folder) == before, "\n".join(said)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_disk_that_fills_up_leaves_the_former_checkpoint_as_it_was(tmp_path, monkeypatch, where):
    is_same, said = fill_up(tmp_path / "run", ALONE, monkeypatch, where)
    assert is_same
    assert "no checkpoint at step 6 ([Errno 28] No space left on device" in said
    assert "the newest checkpoint is step-00000003; make room there and resume the run" in said
    again = job("digits-cnn", tmp_path / "run", max_steps=6, resume=True)
    assert train_recipe(again, ALONE) == "done"


def fill_up_on(rank, folder, full_rank):
    place = dkfac.distributed.Place(rank, 2, torch.device("cpu"))
    return fill_up(folder, place, pytest.MonkeyPatch(), "fsync", rank == full_rank)


@pytest.mark.slow
@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_of_one_rank_leaves_the_former_checkpoint_as_it_was(tmp_path, full_rank):
    found = on_processes(2, fill_up_on, str(tmp_path / "run"), full_rank)
    assert [is_same for is_same, _ in found] == [True, True]
    assert ("another rank could not write" if full_rank else "No space left on device") in found[0][1]


def contents(folder):
    return {path: path.read_bytes() for path in (Path(folder) / "checkpoints").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "a"
    train_recipe(job("digits-cnn", folder, max_steps=6, save_every=3), ALONE)
    return folder


def test_a_wrong_resume_changes_nothing(run, capsys, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    resume = ["--resume", str(run)]
    assert "is from recipe digits-cnn, not autoencoder" in failed(capsys, "train", "autoencoder", *resume)
    assert "was started with 64" in failed(capsys, "train", "digits-cnn", *resume, "--batch", "32")
    assert "was started with 0" in failed(capsys, "train", "digits-cnn", *resume, "--seed", "1")
    assert "was started with K-FAC" in failed(capsys, "train", "digits-cnn", *resume, "--no-kfac")
    assert "omit --out" in failed(capsys, "train", "digits-cnn", *resume, "--out", str(tmp_path / "b"))
    wrong = job("digits-cnn", run, kfac=None, resume=True)
    with pytest.raises(ValueError, match="is from a run with K-FAC"):
        train_recipe(wrong, ALONE)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        train_recipe(replace(wrong, kfac=QUIET, resume_at="step-00000099"), ALONE)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_can_be_chosen_and_later_ones_go(run):
    said = []
    train_recipe(job("digits-cnn", run, max_steps=5, resume=True, resume_at="step-00000003"), ALONE, said.append)
    assert f"resumed from {run}/checkpoints/step-00000003" in said
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000005"]
    assert [entry["step"] for entry in lines(run, "step")] == [1, 2, 3, 4, 5]


def test_a_folder_in_use_is_refused(run):
    with open(run / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is in use by another process"):
            train_recipe(job("digits-cnn", run, max_steps=7, resume=True), ALONE)


def test_a_run_that_died_before_its_first_checkpoint_is_begun_anew(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if the package were not installed
    common = ["train", "digits-cnn", "--steps", "2", "--set", "announce=False"]
    assert "needs the package tensorboard" in failed(capsys, *common, "--tensorboard", "--out", str(tmp_path / "a"))
    assert main([*common, "--out", str(tmp_path / "a")]) == 0  # nothing was left
    capsys.readouterr()
    for path in (tmp_path / "a/checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    for path in (tmp_path / "a/checkpoints").iterdir():
        path.rmdir()
    (tmp_path / "a/metrics.jsonl").write_bytes(b'null\n\xff\xff\n{"kind": "st')
    assert main([*common, "--resume", str(tmp_path / "a")]) == 0
    assert "no checkpoint yet: the run starts from the beginning" in capsys.readouterr().err
    assert [entry["kind"] for entry in lines(tmp_path / "a", "end")] == ["end"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(RuntimeError, match=r"the weights are not finite at step 1 .*: lower lr$"):
        train_recipe(
            job("digits-cnn", tmp_path / "a", kfac=None, lr=1e30, weight_decay=1e30, warmup=0.0, save_every=1), ALONE
        )
    assert not (tmp_path / "a/checkpoints").exists()


def spoiled(rank, folder, with_kfac):
    """Train on two ranks, of which one meets a loss that is not a number; there is one picture to be judged by."""
    place = dkfac.distributed.Place(rank, 2, torch.device("cpu"))
    one = job("digits-cnn", f"{folder}/{with_kfac}", max_steps=8, kfac=QUIET if with_kfac else None)
    count = iter(range(100))  # a pass that does not count comes first

    def load(path, hyper):
        train_set, test_set = one.recipe.load(path, hyper)
        return train_set, Tensors(test_set.inputs[:1], test_set.targets[:1])

    def loss(output, targets):
        found = one.recipe.loss(output, targets)
        return found * torch.nan if rank == 1 and output.requires_grad and next(count) == 5 else found

    try:
        return train_recipe(replace(one, recipe=replace(one.recipe, load=load, loss=loss)), place)
    except RuntimeError as error:
        return str(error)


def twice_spoiled(rank, folder):
    return spoiled(rank, folder, False), spoiled(rank, folder, True)


def test_a_loss_that_is_not_finite_ends_all_ranks_or_none(tmp_path):
    found = on_processes(2, twice_spoiled, str(tmp_path))
    without, with_kfac = zip(*found, strict=True)
    assert without[0] == without[1]
    assert "the weights are not finite at step 5 (loss nan): lower lr" in without[0]
    assert with_kfac == ("done", "done")  # K-FAC passes over such a batch
    steps = lines(tmp_path / "True", "step")
    assert [entry["step"] for entry in steps if entry["loss"] is None] == [5]
    assert lines(tmp_path / "True", "test")[-1]["loss"] > 0


def test_all_ranks_write_to_the_first_ones_folder():
    assert on_threads(3, said_by_first) == ["folder of 0"] * 3


def said_by_first(rank):
    place = dkfac.distributed.Place(rank, 3, torch.device("cpu"))
    return dkfac.distributed.from_first(f"folder of {rank}", place)


def test_a_checkpoint_that_lacks_a_ranks_file_is_not_whole(tmp_path):
    checkpoints.write_state(tmp_path, 1, "common", {})
    checkpoints.write_state(tmp_path, 1, "rank-0", {})
    place = checkpoints.commit(tmp_path, 1, {"world_size": 2})
    assert checkpoints.fault(place) == "rank-1.pt was not written"
    (tmp_path / "latest").write_bytes(b"step-\xff")
    assert checkpoints.newest(tmp_path, []) is None


def test_no_signal_is_lost_and_a_second_one_ends(monkeypatch):
    with Signals() as found:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):  # a launcher passes it on
            os.kill(os.getpid(), number)
        assert [found.agreed(step, ALONE) for step in range(3)] == ["SIGTERM", "SIGUSR1", None]
        monkeypatch.setattr(signals, "ECHO", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def steps_agreed(rank, pause):
    place, found, seen = dkfac.distributed.Place(rank, 2, torch.device("cpu")), Signals(), []
    for step in range(1, 60):
        time.sleep(pause if rank else 0)
        if step == 7 and rank:
            found._note(signal.SIGTERM, None)
        seen.append(found.agreed(step, place))
        if seen[-1]:
            break
    return len(seen)


def test_ranks_tell_each_other_at_each_slow_step(monkeypatch):
    monkeypatch.setattr(signals, "LATENCY", 0.05)
    assert on_threads(2, steps_agreed, 0.06) == [7, 7]
    monkeypatch.setattr(signals, "LATENCY", 100.0)  # quick steps, however loaded the machine is
    one, other = on_threads(2, steps_agreed, 0.0)
    assert one == other > 7


def test_srun_is_known_by_its_step(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "MASTER", "RANK", "WORLD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")  # of a batch script, which is one process
    assert not dkfac.distributed.is_step_of_slurm()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert dkfac.distributed.is_step_of_slurm()
    for nodes, first in (("gpu[03-07,12],x1", "gpu03"), ("a7,b2", "a7"), ("host", "host")):
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        dkfac.distributed._read_slurm()
        assert os.environ["MASTER_ADDR"] == first
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")


def test_settings_of_a_recipe_go_with_those_that_are_given(tmp_path, capsys):
    common = ["train", "autoencoder", "--steps", "1", "--out", str(tmp_path / "a")]
    assert main([*common, "--set", "inverse_interval=7", "--set", "announce=False"]) == 0
    assert json.loads((tmp_path / "a/settings.json").read_text())["kfac"]["inverse_interval"] == 7
    with pytest.raises(SystemExit):
        main(["compare", "digits-cnn", "--no-kfac"])
    assert "did you mean --no-kfac" not in capsys.readouterr().err


def test_an_interruption_is_one_line(monkeypatch, capsys, tmp_path):
    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training, "_load", interrupted)
        assert main(["train", "digits-cnn", "--out", str(tmp_path / "a")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "dkfac: rank 0: interrupted"
    (tmp_path / "file").write_text("")
    assert "file" in failed(capsys, "train", "digits-cnn", "--out", str(tmp_path / "file"))
