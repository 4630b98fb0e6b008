"""Each example runs as a user would run it, shortened, and shows what it says."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORT = {"one_line.py": ("2", "test accuracy"), "by_hand.py": ("150", "K-FAC, lr 0.5: loss")}
"""Per example: its argument here, and what its output must have."""


@functools.cache
def run(path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(path), SHORT[path.name][0]]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)


def test_each_example_is_known_here():
    assert sorted(SHORT) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_one_story_on_one_screen(path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_warning_and_shows_its_result(path):
    result = run(path)
    assert result.returncode == 0, result.stderr
    assert SHORT[path.name][1] in result.stdout
    assert "keep your lr and schedule" in result.stderr


def test_one_added_line_learns_the_digits_in_two_epochs():
    last = run(ROOT / "examples/one_line.py").stdout.splitlines()[-1]
    assert float(last.split("accuracy ")[1].rstrip("%")) > 94


def test_by_hand_k_fac_ends_far_below_the_best_plain_learning_rate():
    lines = [line for line in run(ROOT / "examples/by_hand.py").stdout.splitlines() if "loss" in line]
    losses = {line.split(":")[0]: float(line.split("loss ")[1]) for line in lines}
    ours = losses.pop("K-FAC, lr 0.5")
    assert len(losses) == 3
    assert ours < 0.5 * min(losses.values())
