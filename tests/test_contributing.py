"""The worked diffs of CONTRIBUTING.md apply to the package as it is, and do what they say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^### (?P<name>[^\n]+)\n(?P<body>.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(diff|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = {
    found["name"]: dict(BLOCK.findall(found["body"]))
    for found in SECTION.finditer((ROOT / "CONTRIBUTING.md").read_text())
}


def test_there_is_an_example_of_everything_that_can_be_added():
    assert list(EXAMPLES) == ["A strategy", "A solver", "A curvature", "A kind of layer"]


def run(code, tree):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env={"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_worked_diff_applies_and_does_what_it_says(name, tmp_path):
    example = EXAMPLES[name]
    assert len(re.findall(r"^\+\+\+ ", example["diff"], re.MULTILINE)) <= 2, "at most two files"
    shutil.copytree(ROOT / "dkfac", tmp_path / "dkfac", ignore=shutil.ignore_patterns("__pycache__"))
    before = run(example["python"], tmp_path)
    assert before.returncode != 0, "the check passes without the diff, so it shows nothing"
    apply = ["git", "apply", "-C1", "-"]
    subprocess.run(apply, cwd=tmp_path, input=example["diff"], text=True, check=True)
    after = run(example["python"], tmp_path)
    assert after.returncode == 0, after.stderr
