"""Shapes of training script (tests/scripts), each run unmodified through ``dkfac run`` and with the one line."""

import re
from dataclasses import replace

import pytest
import torch
from helpers_resume import AFTER
from helpers_scripts import Forks
from helpers_shapes import BEGIN, END, PAGE, SCRIPTS, SHAPES, cells, copied, run_shape


@pytest.fixture(scope="module")
def forks():
    found = Forks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """Run a script through ``dkfac run`` from beginning to end, once."""
    known = {}

    def run(shape):
        if shape.name not in known:
            known[shape.name] = run_shape(forks, shape, tmp_path_factory.mktemp(shape.name), through_run=True)
        return known[shape.name]

    return run


def check(shape, run, *, through_run):
    assert run.status == shape.status, run.stderr
    assert run.losses[1] < run.losses[0]
    assert run.shares == shape.shares_of(through_run=through_run), run.stderr
    assert "switched off" not in run.stderr
    assert "Traceback" not in run.stderr


def marked(shapes, *, slow):
    return [pytest.param(s, id=s.name, marks=[pytest.mark.slow] if slow(s) else []) for s in shapes]


def test_the_scripts_know_nothing_of_kfac_and_all_are_in_the_table():
    paths = [path for path in SCRIPTS.rglob("*.py") if path.stem not in ("__init__", "model")]
    names = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts) for path in paths}
    assert names == {shape.name for shape in SHAPES}
    assert len(names) >= 24
    assert not [path for path in paths if re.search("dkfac|k-fac", path.read_text(), re.IGNORECASE)]


def test_the_table_in_the_docs_has_a_row_for_each_script_and_all_are_green():
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[3:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[1], row[5]) for row in rows] == [cells(shape) for shape in SHAPES]
    for shape, row in zip(SHAPES, rows, strict=True):
        assert row[4] == (shape.why_not_resumed or "bitwise")
        for loss in row[2:4]:
            first, arrow, last = loss.partition(" → ")
            assert (not arrow and loss == shape.why_no_line) or float(last) < float(first)


@pytest.mark.parametrize("shape", marked(SHAPES, slow=lambda shape: False))
def test_an_unmodified_script_trains_through_dkfac_run(shape, forks, whole, tmp_path):
    run = whole(shape)
    check(shape, run, through_run=True)
    own = [line for line in run.stderr.splitlines() if line.startswith("dkfac run: ")]
    assert (shape.says is not None) == bool(own), run.stderr
    assert shape.says is None or shape.says in run.stderr
    assert "stepped parameters that K-FAC preconditions for another" not in run.stderr  # it follows instead


@pytest.mark.parametrize("shape", marked([s for s in SHAPES if s.line is not None], slow=lambda shape: shape.slow_line))
def test_with_the_one_line_it_ends_with_the_same_weights_although_it_is_resumed_in_the_middle(shape, forks, whole,
    tmp_path):  # fmt: skip
    after = None if shape.why_not_resumed else AFTER
    run = run_shape(forks, shape, tmp_path / "line", through_run=False, after=after)
    if after is not None:
        check(shape, replace(run, shares=run.shares[: len(run.shares) - run.num_interrupted]), through_run=False)
        assert run.num_interrupted > 0
    like = whole(shape) if shape.is_like_line else run_shape(forks, shape, tmp_path / "whole", through_run=False)
    check(shape, like, through_run=shape.is_like_line)
    assert run.digest == like.digest


RESUMED = ("closure", "folds", "gan_frozen")


@pytest.mark.parametrize(
    "shape", marked([s for s in SHAPES if not s.why_not_resumed], slow=lambda shape: shape.name not in RESUMED)
)
def test_through_dkfac_run_too_it_resumes_bitwise(shape, forks, whole, tmp_path):
    run = run_shape(forks, shape, tmp_path, through_run=True, after=AFTER)
    assert run.num_interrupted > 0
    assert run.digest == whole(shape).digest


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
