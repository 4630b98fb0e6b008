"""The command line: what ``dkfac plan`` says, what ``dkfac measure`` writes, and how wrong input is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes
from torch import nn

from dkfac.config.settings import Settings
from dkfac.plan.cluster import Cluster
from dkfac.tools.cli.main import main
from dkfac.tools.cli.plan import parse_bytes
from dkfac.tools.measure import links, machine
from dkfac.tools.measure.model import shapes_of

ROOT = Path(__file__).parents[2]


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.Flatten(), nn.Linear(8 * 9, 5)
    )


def no_model() -> str:
    return "text"


def test_a_plan_is_a_ranking_with_a_recommendation_and_a_reason(capsys):
    assert main(["plan", "resnet50", "--ranks", "64", "--cluster", "spd-kfac-64", "--solver", "cholesky"]) == 0
    said = capsys.readouterr().out
    assert "resnet50 on 64 ranks (4 per host)" in said
    assert "recommended: dkfac.KFAC(model, optimizer, strategy=" in said
    assert "reason: " in said
    rows = [line.split() for line in said.splitlines() if line[:3].strip().isdigit()]
    assert len(rows) == 12
    times = [float(row[-5]) for row in rows]
    assert times == sorted(times)


def test_what_was_never_measured_is_said(capsys):
    main(["plan", "resnet18", "--ranks", "512", "--cluster", "spd-kfac-64"])
    assert "collectives of 512 ranks were not measured" in capsys.readouterr().out
    main(["plan", "resnet18", "--ranks", "8"])
    assert "estimates; to measure, use `dkfac measure`" in capsys.readouterr().out


def test_a_users_own_model_is_built_without_memory_and_run_without_data(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert main(["plan", "test_cli:small_model", "--ranks", "4", "--input", "16,3,8,8"]) == 0
    assert "test_cli:small_model on 4 ranks" in capsys.readouterr().out


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(600, 1000), nn.ReLU(), nn.Linear(1000, 10))


def test_a_users_own_model_is_planned_with_whole_factors_and_with_pieces_of_them(capsys, monkeypatch):
    """Not with pieces of the pieces that KFAC's default has."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert main(["plan", "test_cli:wide_model", "--ranks", "4", "--input", "64,600", "--block-dim", "256"]) == 0
    said = capsys.readouterr().out
    assert "block_dim=256)" in said
    more = re.search(r"without them, .* takes (.*) ms more", said)
    assert more is not None
    assert float(more[1]) > 1


def test_positions_are_those_of_the_outputs():
    found = shapes_of(small_model(), (16, 3, 8, 8), Settings())
    assert [(shape.spec.name, shape.positions) for shape in found] == [("0", 64), ("2", 9), ("4", 1)]
    assert [[f.dim for f in shape.spec.factors] for shape in found] == [[28, 4], [37, 8], [73, 5]]
    sequence = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    found = shapes_of(sequence, (8, 12), Settings(), tokens=True)
    assert [(shape.spec.kind, shape.positions) for shape in found] == [("embedding", 12), ("linear", 12)]


def test_the_best_plans_step_can_be_looked_at(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    assert main(["plan", "resnet18", "--ranks", "4", "--trace", str(trace), "--gantt", str(picture)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "backward", "measure", "decompose"}
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "Perfetto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "resnet51", "--ranks", "4"], ["no model 'resnet51'", "resnet50", "package.module:function"]),
        (["plan", "resnet50", "--ranks", "0"], ["--ranks", "1 or more"]),
        (["plan", "resnet50", "--ranks", "4", "--inverse-interval", "15"], ["multiple"]),
        (["plan", "resnet50", "--ranks", "4", "--cluster", "nowhere.json"], ["no such file", "spd-kfac-64"]),
        (["plan", "resnet50", "--ranks", "4", "--memory", "lots"], ["'lots'", "40GB"]),
        (["plan", "resnet50", "--ranks", "2", "--memory", "1MB"], ["no strategy fits", "the least is"]),
        (["plan", "resnet50", "--ranks", "4", "--gpus-per-node", "0"], ["0 ranks on a host"]),
        (["plan", "resnet50", "--ranks", "4", "--batch", "0"], ["--batch 0"]),
        (["plan", "test_cli:small_model", "--ranks", "4"], ["needs --input"]),
        (["plan", "test_cli:small_model", "--ranks", "4", "--input", "16,3,8,x"], ["not a shape"]),
        (["plan", "test_cli:small_model", "--ranks", "4", "--input", "16,5,8,8"], ["cannot be run", "(16, 5, 8, 8)"]),
        (["plan", "test_cli:nothing", "--ranks", "4", "--input", "16,3,8,8"], ["has no 'nothing'"]),
        (["plan", "test_cli:no_model", "--ranks", "4", "--input", "16,3,8,8"], ["str, not a torch.nn.Module"]),
        (["plan", "no_such_module:f", "--ranks", "4", "--input", "16,3"], ["cannot be imported", "PYTHONPATH"]),
        (["measure", "-o", "nowhere/at/all.json"], ["there is no folder"]),
        (["measure", "-o", "x.json", "--device", "tpu"], ["--device tpu"]),
        (["measure", "-o", "x.json", "--ranks-per-host", "0"], ["--ranks-per-host 0"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_wrong_input_is_one_line_with_the_remedy(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dkfac {arguments[0]}: ")
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "value"), [("40GB", 40 * 10**9), ("800MB", 8 * 10**8), ("1.5g", 15 * 10**8), ("7", 7)]
)
def test_amounts_of_memory(text, value):
    assert parse_bytes(text) == value


def test_one_machine_is_measured_into_a_file_that_plans(tmp_path):
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "dkfac", "measure", "-o", str(out), "--device", "cpu", "--largest", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"wrote {out}" in done.stdout
    cluster = Cluster.from_json(out.read_text())
    wanted = {"eigen", "cholesky", "warm-eigen", "precondition", "factor", "average", "products", "pack"}
    assert set(cluster.costs.curves) == wanted
    assert all(curve(64) > 0 for curve in cluster.costs.curves.values())
    assert main(["plan", "resnet18", "--ranks", "4", "--cluster", str(out)]) == 0


def measured(rank, world):
    links.BUFFER_BYTES, links.NUM_REPEATS = (2**10, 2**14, 2**17), 2
    return machine.measure_cluster(torch.device("cpu"), ranks_per_host=1, largest=32, say=lambda text: None).to_json()


def test_ranks_measure_their_links_together_and_all_know_the_result():
    first, second, third = on_processes(3, measured, 3)
    assert first == second == third
    cluster = Cluster.from_json(first)
    assert set(cluster.between) == {"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"}
    assert set(cluster.between["all-reduce"]) == {3}
    assert all(line[3](2**17) > 0 for line in cluster.between.values())
    assert not cluster.within


# --- the command itself, and files of options ---------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["plan", "--help"]], ids=str)
def test_help_does_not_wait_for_torch(arguments):
    code = f"""
import sys
from dkfac.tools.cli.main import main
try:
    main({arguments})
finally:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "dkfac" in done.stdout


CONFIG = """
recipe = "digits-cnn"
lr = 0.05
batch = 64
steps = 3
[set]
block_dim = 64
[more]
"""


def test_options_come_from_a_file_unless_they_are_given(tmp_path, capsys):
    (tmp_path / "a.toml").write_text(CONFIG)
    out = tmp_path / "run"
    arguments = ["train", "--config", str(tmp_path / "a.toml"), "--out", str(out), "--lr", "0.1"]
    assert main(arguments) == 0
    saved = json.loads((out / "settings.json").read_text())
    assert (saved["recipe"], saved["hyper"]["lr"], saved["hyper"]["batch"]) == ("digits-cnn", 0.1, 64)
    assert saved["options"] == {"block_dim": 64}
    assert "at step" not in capsys.readouterr().err, "lines between tests are for terminals"
    assert main(["train", "--resume", str(out), "--steps", "4"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lrr = 1", "there is no option 'lrr'; did you mean lr?"),
        ('lr = "fast"', "lr = 'fast' is not of type float"),
        ("nproc = 1.5", "nproc = 1.5 is not of type int"),
        ("lr 1", "cannot be read"),
        (None, "cannot be read"),
        ("lr = -1", "lr=-1 must be > 0"),
        ("[set]\nblock_dimm = 1", "block_dimm"),
    ],
)
def test_a_wrong_file_of_options_is_one_line(tmp_path, capsys, text, said):
    file = tmp_path / "a.toml"
    if text is not None:
        file.write_text(text)
    assert main(["train", "digits-cnn", "--config", str(file), "--out", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err.strip()
    assert said in line
    assert "\n" not in line
    assert not (tmp_path / "run").exists()


def test_a_recipe_must_be_named(capsys):
    assert main(["train"]) == 2
    assert "name a recipe to train" in capsys.readouterr().err
