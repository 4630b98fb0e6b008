"""doctor, plan, simulate and measure on the wrong path: models that cannot be had, numbers that mean nothing."""

import sys

import pytest

from dkfac.tools.cli.main import main

MODELS = """
import sys
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.LSTM(4, 4), nn.LayerNorm(4)

class Partly(nn.Module):
    def __init__(self, names="a"):
        super().__init__()
        self.a, self.b, self.names = nn.Linear(8, 4), nn.Linear(8, 4), names

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x

def good():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

def wide():
    return nn.Sequential(nn.Linear(20000, 20000), nn.Linear(20000, 20000))

def idle():
    return Partly("")

def quits():
    sys.exit(4)

def refuses():
    return nn.Linear(-1, 3)

def lazy():
    return nn.LazyLinear(3)
"""
FILES = {
    "mine.py": MODELS,
    "broken.py": "import os\ndef f(:\n    pass\n",
    "raises.py": "import json\n\n\ndef read():\n    return json.loads('no')\n\nread()\n",
    "lines.py": "raise RuntimeError('no\\nlicence')\n",
    "lacks.py": "import surely_nowhere\n",
    "script.py": "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args(['--lr', '1'])\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder that is the current one and not on Python's path, as under the installed program."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    "command", [["doctor"], ["plan", "--ranks", "2"], ["simulate", "--ranks", "2"]], ids=lambda c: c[0]
)
def test_models_are_found_in_the_current_folder(project, capsys, command):
    assert main([*command, "mine:good", "--input", "16,8"]) == 0
    assert capsys.readouterr().out


def test_the_current_folder_comes_first(project, capsys):
    (project / "this.py").write_text("from mine import good\n")  # the standard library has one too
    was = sys.modules.pop("this", None)
    try:
        assert main(["doctor", "this:good"]) == 0
    finally:
        sys.modules.pop("this")
        if was is not None:
            sys.modules["this"] = was
    assert "2 layers, 46 parameters preconditioned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        ("wide", ["0: A of dim 20001 > max_dim=8192", "1: A of dim 20001 > max_dim=8192"]),
        ("Recurrent", ["cell: no K-FAC rule for LSTM", 'norm: norm layer (norm_form="off")']),
        ("lazy", ["is lazy and has no shape yet"]),
    ],
)
def test_the_reasons_why_nothing_can_be_preconditioned_are_said(project, capsys, model, reasons):
    commands = ["doctor"], ["doctor", "--input", "4,8"], ["plan", "--ranks", "2", "--input", "4,8"]
    for command in commands:
        line = refused(capsys, *command, f"mine:{model}")
        assert line.startswith(f"dkfac {command[0]}: mine:{model}: ")
        for reason in reasons:
            assert reason in line


def test_a_layer_that_is_not_called_is_noted_and_the_rest_reported(project, capsys):
    assert main(["doctor", "mine:Partly", "--input", "16,8"]) == 0
    out = capsys.readouterr().out
    assert "not called in the forward pass, so not included in memory and times: b\n" in out
    assert "times that without K-FAC" in out
    for command in ("plan", "simulate"):
        assert main([command, "mine:Partly", "--input", "16,8", "--ranks", "2"]) == 0
        said = capsys.readouterr()
        assert said.err == f"dkfac {command}: not called in the forward pass, so not included in memory and times: b\n"
        assert "ms" in said.out
    assert "was called in the forward pass: a, b" in refused(capsys, "doctor", "mine:idle", "--input", "16,8")


@pytest.mark.parametrize("model", ["./mine.py:good", "mine.py:good", ".mine:good", ":good", "mine:", "mine", "a..b:c"])
def test_what_is_no_name_of_a_function_is_refused(project, capsys, model):
    line = refused(capsys, "doctor", model)
    assert line == f"dkfac doctor: {model!r} is not package.module:function, for example my_train:build_model"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("broken:f", ["'broken' cannot be imported: SyntaxError: ", "{folder}/broken.py:2"]),
        ("raises:f", ["'raises' cannot be imported: JSONDecodeError: ", ", at {folder}/raises.py:5"]),
        ("lines:f", ["RuntimeError: no licence, at {folder}/lines.py:1"]),
        ("lacks:f", ["ModuleNotFoundError: No module named 'surely_nowhere', at {folder}/lacks.py:1"]),
        ("script:f", ["'script' cannot be imported: SystemExit: 2, at {folder}/script.py:3"]),
        ("nowhere:f", ["(No module named 'nowhere'); it is searched for in this folder and on PYTHONPATH"]),
        ("mine.deep:f", ["it is searched for in this folder and on PYTHONPATH"]),
        ("mine:quits", ["SystemExit: 4, at {folder}/mine.py:30"]),
        ("mine:refuses", ["negative dimension", ", at {folder}/mine.py:33"]),
        ("mine:nothing", ["'mine' has no 'nothing'"]),
    ],
)
def test_a_users_own_error_is_one_line_with_its_place(project, capsys, model, words):
    line = refused(capsys, "doctor", model)
    for word in words:
        assert word.format(folder=project) in line


COUNTS = "--ranks and the intervals must be 1 or more"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["plan", "resnet18", "--ranks", "2", "--inverse-interval", n], COUNTS) for n in ("0", "-100")),
        *((["simulate", "resnet18", "--ranks", "2", "--inverse-interval", n], COUNTS) for n in ("0", "-100")),
        *((["doctor", "mine:good", "--inverse-interval", n], COUNTS) for n in ("0", "-100")),
        (["doctor", "mine:good", "--input", "16,8", "--factor-interval", "-10"], COUNTS),
        (["plan", "resnet18", "--ranks", "2", "--top", "0"], "--top 0: must be 1 or more"),
        (["plan", "resnet18", "--ranks", "2", "--top", "-3"], "--top -3: must be 1 or more"),
        (["plan", "resnet18", "--ranks", "2", "--memory=-5GB"], "--memory '-5GB' is not an amount"),
        (["plan", "resnet18", "--ranks", "2", "--memory", "infGB"], "--memory 'infGB' is not an amount"),
        (["doctor", "mine:good", "--input", "16,-8"], "--input '16,-8' is not a shape"),
        (["plan", "mine:good", "--ranks", "2", "--input", "0,8"], "--input '0,8' is not a shape"),
        (
            ["measure", "-o", "c.json", "--device", "cpu", "--largest", "-5"],
            "--largest -5 leaves too little to measure",
        ),
        (["measure", "-o", "c.json", "--device", "cpu", "--largest", "31"], "too little to measure: use 32 or more"),
        (["measure", "-o", ".", "--device", "cpu", "--largest", "32"], "-o . is a folder: use the name of a file"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_numbers_that_mean_nothing_are_one_line(project, capsys, arguments, words):
    assert words in refused(capsys, *arguments)
    assert not (project / "c.json").exists()
