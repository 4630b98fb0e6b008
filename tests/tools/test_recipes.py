"""Every recipe trains a few steps; a run goes on bitwise; signals, full disks and wrong options end well."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_pictures import write_folder
from helpers_ranks import on_processes
from test_pictures import write_cifar, write_idx

import dkfac
from dkfac.tools.cli.main import main
from dkfac.tools.recipes import checkpoints, fashion_cnn
from dkfac.tools.recipes.every import RECIPES
from dkfac.tools.recipes.folder import entries
from dkfac.tools.recipes.hyper import Hyper
from dkfac.tools.recipes.job import TrainingJob
from dkfac.tools.recipes.recipe import lr_fraction
from dkfac.tools.recipes.training import train_recipe

ALONE = dkfac.distributed.Place(0, 1, torch.device("cpu"))
QUIET = {"announce": False}


def job(name, folder, *, data=None, kfac=QUIET, more=None, **hyper):
    recipe = RECIPES[name]
    said = {key: value for key, value in hyper.items() if key in Hyper.__slots__}
    rest = {key: value for key, value in hyper.items() if key not in said}
    own = replace(recipe.hyper, **said, more={**recipe.hyper.more, **(more or {})})
    options = {"recipe": recipe, "hyper": recipe.adapt(own, said), "kfac": kfac, "data": data, "folder": Path(folder)}
    return TrainingJob(**options, **rest)


def lines(folder, kind):
    return [entry for entry in entries(Path(folder) / "metrics.jsonl") if entry["kind"] == kind]


def weights(folder):
    place = checkpoints.newest(Path(folder) / "checkpoints", [])
    return checkpoints.read_state(place, "common", torch.device("cpu"))["model"]


@pytest.mark.parametrize("kfac", [None, QUIET], ids=["first order", "kfac"])
def test_digits_learn(tmp_path, kfac):
    said = []
    assert train_recipe(job("digits-cnn", tmp_path, epochs=3.0, kfac=kfac), ALONE, said.append) == "done"
    tests = lines(tmp_path, "test")
    assert [round(point["epoch"]) for point in tests] == [1, 2, 3]
    assert tests[-1]["accuracy"] > 0.9
    steps = lines(tmp_path, "step")
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[-1]["seconds"] >= steps[0]["seconds"] > 0
    assert ("kfac" in steps[0]) == (kfac is not None)
    assert bool(lines(tmp_path, "spectrum")) == (kfac is not None)
    assert lines(tmp_path, "end")[0]["reason"] == "done"
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["recipe"] == "digits-cnn"
    assert (settings["kfac"] is None) == (kfac is None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["peak_memory_bytes"][0] > 1e7
    assert json.loads((tmp_path / "environment.json").read_text())["torch"] == torch.__version__
    assert said[-1].startswith("step 66 of 66, epoch 3.02, test loss")


def test_the_autoencoder_and_text(tmp_path):
    train_recipe(job("autoencoder", tmp_path / "a", epochs=3.0), ALONE)
    assert lines(tmp_path / "a", "test")[-1]["loss"] < 0.5
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    train_recipe(
        job("char-gpt", tmp_path / "b", data=str(tmp_path / "text.txt"), batch=16, epochs=1.0, more=SMALL), ALONE
    )
    points = lines(tmp_path / "b", "step")
    assert points[-1]["loss"] < points[0]["loss"] - 0.3
    assert "accuracy" not in lines(tmp_path / "b", "test")[0]


def test_fashion_and_cifar(tmp_path):
    import numpy

    folder, random = tmp_path / "fashion", numpy.random.default_rng(0)
    folder.mkdir()
    for prefix, number in (("train", 60), ("t10k", 20)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", random.integers(0, 255, (number, 28, 28)))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", numpy.arange(number) % 10)
    cheap = {"solver": "cholesky", **QUIET}
    train_recipe(job("fashion-cnn", tmp_path / "f", data=str(folder), batch=20, epochs=1.0, kfac=cheap), ALONE)
    assert len(lines(tmp_path / "f", "step")) == 3
    folder = tmp_path / "cifar"
    folder.mkdir()
    write_cifar(folder)
    options = {"data": str(folder), "batch": 10, "epochs": 1.0, "more": {"depth": 8}}
    train_recipe(job("cifar10-resnet32", tmp_path / "c", **options), ALONE)
    assert len(lines(tmp_path / "c", "step")) == 2


TINY = {"size": 32, "batch": 8, "micro_batch": 4, "max_steps": 20, "epochs": 10.0}


@pytest.mark.parametrize("depth", [50, 101, pytest.param(152, marks=pytest.mark.slow)])
def test_imagenet_recipes_take_20_steps_on_a_folder(tmp_path, depth):
    write_folder(tmp_path / "data", sizes=[(80, 70), (70, 90)], number=8)
    options = TINY | ({"max_steps": 20} if depth == 50 else {"max_steps": 2})
    name = f"imagenet-resnet{depth}"
    train_recipe(job(name, tmp_path / "run", data=str(tmp_path / "data"), more={"width": 4}, **options), ALONE)
    assert lines(tmp_path / "run", "end")[0]["step"] == options["max_steps"]
    assert all(point["loss"] > 0 for point in lines(tmp_path / "run", "step"))


LARGE = pytest.param("imagenet-resnet50-large-batch", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["digits-cnn", LARGE])
def test_a_run_goes_on_bitwise(tmp_path, name):
    options = {"epochs": 3.0, "save_every": 5}
    if name != "digits-cnn":
        write_folder(tmp_path / "data", sizes=[(20, 20)], number=8)
        options |= {"data": str(tmp_path / "data"), "batch": 8, "micro_batch": 4, "max_steps": 8, "epochs": 35.0}
        options["more"] = {"row": 4096, "width": 2}
    whole = job(name, tmp_path / "whole", **options)
    assert train_recipe(whole, ALONE) == "done"
    begun = replace(whole, folder=tmp_path / "cut", max_steps=7)
    train_recipe(begun, ALONE)
    (tmp_path / "cut/checkpoints/step-00000007/common.pt").write_bytes(b"broken")  # so that it goes on from 5
    said = []
    train_recipe(replace(whole, folder=tmp_path / "cut", resume=True), ALONE, said.append)
    assert "is skipped: common.pt is damaged" in said[0]
    assert "step-00000005" in said[1]
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    a, b = ([(e["step"], e["loss"]) for e in lines(tmp_path / place, "step")] for place in ("cut", "whole"))
    assert a == b
    assert lines(tmp_path / "cut", "resume") == [{"kind": "resume", "step": 5}]


SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16}


def on_rank(rank, folder, world_size):
    place = dkfac.distributed.Place(rank, world_size, torch.device("cpu"))
    common = {"data": f"{folder}/text.txt", "batch": 12, "epochs": 1.0, "save_every": 4, "more": SMALL}
    train_recipe(job("char-gpt", f"{folder}/whole", max_steps=10, **common), place)
    train_recipe(job("char-gpt", f"{folder}/cut", max_steps=4, **common), place)
    return train_recipe(job("char-gpt", f"{folder}/cut", max_steps=10, resume=True, **common), place)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_go_on_bitwise(tmp_path, world_size):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    assert on_processes(world_size, on_rank, str(tmp_path), world_size) == ["done"] * world_size
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, status):
    command = [sys.executable, "-m", "dkfac", "train", "digits-cnn", "--epochs", "400", "--out", str(tmp_path / "run")]
    child = subprocess.Popen([*command, "--set", "announce=False"], stderr=subprocess.PIPE, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
            break
        time.sleep(0.1)
    child.send_signal(number)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == status, said
    assert f"to continue: dkfac train digits-cnn --resume {tmp_path / 'run'}" in said
    last = lines(tmp_path / "run", "end")[0]
    assert checkpoints.newest(tmp_path / "run/checkpoints", []).name == f"step-{last['step']:08d}"


def test_schedules():
    line = Hyper(warmup=0.1)
    assert [lr_fraction(line, step, 100, 0) for step in (0, 9, 10, 55, 99)] == pytest.approx(
        [0.1, 1.0, 1.0, 0.5, 1 / 90]
    )
    tenths = Hyper(warmup=0.0, decay="steps", milestones=(35, 75))
    assert [lr_fraction(tenths, 0, 100, epoch) for epoch in (0, 34.9, 35, 80)] == pytest.approx([1, 1, 0.1, 0.01])


def failed(capsys, *arguments):
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_wrong_words_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean digits-cnn?" in failed(capsys, "train", "digit-cnn")
    assert "K-FAC has no such setting" in failed(capsys, "train", "digits-cnn", "--set", "dampin=1")
    assert "damping=-1 is not" in failed(capsys, "train", "digits-cnn", "--set", "damping=-1")
    for option, value, wanted in (
        ("lr", "0", "lr=0.0 must be > 0"),
        ("epochs", "inf", "epochs=inf must be > 0"),
        ("warmup", "-3", "warmup=-3.0 must be in [0, 1]"),
        ("warmup", "nan", "warmup=nan must be in [0, 1]"),
        ("momentum", "7", "momentum=7.0 must be in [0, 1)"),
        ("seed", "99999999999999999999", "seed=99999999999999999999 must be in"),
        ("steps", "0", "--steps 0: must be 1 or more"),
        ("save-every", "-1", "--save-every -1: must be 0 or more"),
    ):
        assert wanted in failed(capsys, "train", "digits-cnn", f"--{option}", value)
    assert "but --no-kfac is given" in failed(capsys, "train", "digits-cnn", "--no-kfac", "--set", "damping=1")
    assert "--nproc 0" in failed(capsys, "train", "digits-cnn", "--nproc", "0")
    assert "batch=33 cannot be divided" in failed(capsys, "train", "digits-cnn", "--nproc", "2", "--batch", "33")
    assert "has no such hyperparameter; it has depth" in failed(capsys, "train", "cifar10-resnet32", "--more", "x=1")
    assert "not a run folder" in failed(capsys, "train", "digits-cnn", "--resume", "nowhere")
    assert "none of the published rows" in failed(capsys, "train", "imagenet-resnet50-large-batch", "--batch", "100")
    assert "name a recipe to compare" in failed(capsys, "compare")
    assert "there is no script" in failed(capsys, "compare", "--script", "none.py")
    assert "'a b' is not a number" in failed(capsys, "train", "cifar10-resnet32", "--more", "depth=a b")
    (tmp_path / "mine.py").write_text("")
    assert "--lr is for recipes" in failed(capsys, "compare", "--script", "mine.py", "--lr", "3")
    (tmp_path / "mine.py").unlink()
    with pytest.raises(SystemExit):
        main(["train", "digits-cnn", "--epoch", "3"])
    assert "did you mean --epochs?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trian"])
    assert capsys.readouterr().err.endswith("; did you mean train?\n")
    assert not list(tmp_path.iterdir())


def test_missing_data_says_what_to_put_where(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, wanted in (
        ("fashion-cnn", "dataset-fashion-mnist"),
        ("cifar10-resnet32", "data_batch_1"),
        ("imagenet-resnet50", "train/<class>/*.jpg"),
    ):
        if name != "fashion-cnn" or not Path(fashion_cnn.DEBIAN).exists():
            assert wanted in failed(capsys, "train", name)
    assert "omit --data" in failed(capsys, "train", "digits-cnn", "--data", "here")
    assert "no text at" in failed(capsys, "train", "char-gpt", "--data", "here")


def test_a_folder_is_not_written_over(tmp_path, capsys):
    arguments = ["train", "digits-cnn", "--steps", "2", "--out", str(tmp_path / "a"), "--set", "announce=False"]
    assert main(arguments) == 0
    assert "already has a run" in failed(capsys, *arguments)
    assert main([*arguments, "--batch", "32", "--out", str(tmp_path / "b")]) == 0
    assert main([*arguments[:2], "--steps", "4", "--resume", str(tmp_path / "b")]) == 0  # with all it was started with
    assert lines(tmp_path / "b", "end")[-1]["step"] == 4
    settings = json.loads((tmp_path / "b/settings.json").read_text())
    assert settings["hyper"]["batch"] == 32
    assert settings["options"] == {"announce": False}


def test_compare_says_who_was_first(tmp_path, capsys):
    options = ["--epochs", "1", "--seeds", "2", "--out", str(tmp_path / "c"), "--set", "announce=False"]
    assert main(["compare", "digits-cnn", *options]) == 0
    out = capsys.readouterr().out
    assert "first order" in out
    assert "the first-order optimizer's final accuracy" in out
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["first-order-0", "first-order-1", "kfac-0", "kfac-1"]


def test_compare_on_two_processes(tmp_path):
    command = [sys.executable, "-m", "dkfac", "compare", "digits-cnn", "--nproc", "2", "--epochs", "0.6"]
    found = subprocess.run([*command, "--out", str(tmp_path / "c")], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert "K-FAC" in found.stdout
    assert json.loads((tmp_path / "c/kfac-0/settings.json").read_text())["world_size"] == 2
    assert len(json.loads((tmp_path / "c/kfac-0/summary.json").read_text())["peak_memory_bytes"]) == 2
    measured, simulated = json.loads((tmp_path / "c/kfac-0/timeline.json").read_text())
    assert measured["title"] == "measured, refresh"
    for timeline in (measured, simulated):
        assert {span["rank"] for span in timeline["spans"]} == {0, 1}
        assert {"forward", "backward", "decompose", "precondition"} <= {span["stage"] for span in timeline["spans"]}


SCRIPT = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]), momentum=0.9)
truth = torch.randn(10, 3)
for step in range(10_000):
    x = torch.randn(64, 10)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
    optimizer.step()
"""


@pytest.mark.slow  # test_compare_paths.py compares one too
def test_a_script_is_compared(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    assert main(["compare", "--script", "mine.py", "--steps", "40", "--out", "c", "--", "0.05"]) == 0
    out = capfd.readouterr().out
    assert "final loss of the first-order run" in out
    for name in ("first-order-0", "kfac-0"):
        assert [entry["step"] for entry in lines(tmp_path / "c" / name, "step")] == list(range(1, 41))


def test_recipes_doctor_and_simulate_speak(capsys, tmp_path, monkeypatch):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)
    assert main(["doctor"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out
    (tmp_path / "my_train.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))\n"
        "def wrong(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "my_train:build", "--input", "16,8"]) == 0
    out = capsys.readouterr().out
    assert "2 layers, 46 parameters preconditioned" in out
    assert "times that without K-FAC" in out
    assert main(["doctor", "my_train:build"]) == 0
    assert "set --input" in capsys.readouterr().out
    assert "cannot be called without arguments" in failed(capsys, "doctor", "my_train:wrong")
    assert "is not package.module:function" in failed(capsys, "doctor", "my_train")
    for block_dim, pieces in ((), ", pieces of 256"), (("--block-dim", "none"), ""):
        assert main(["simulate", "resnet18", "--ranks", "4", "--strategy", "sharded", "--overlap", *block_dim]) == 0
        out = capsys.readouterr().out
        assert f"sharded, overlap{pieces}, 4 ranks" in out
        assert "refresh, 1 of 100" in out
