"""Checkpoints of runs: whole or not there, whatever happens while they are written or to their bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from dkfac.tools.recipes import checkpoints

CPU = torch.device("cpu")


def save(folder, step, value=None):
    state = {"weights": torch.full((50,), float(step if value is None else value)), "step": step}
    checkpoints.write_state(folder, step, "common", state)
    checkpoints.write_state(folder, step, "rank-0", {"session": {}})
    return checkpoints.commit(folder, step, {"recipe": "r", "world_size": 1})


def newest(folder):
    said = []
    place = checkpoints.newest(folder, said)
    return (None if place is None else int(checkpoints.read_state(place, "common", CPU)["step"])), said


def test_the_last_two_are_kept_and_the_newest_is_found(tmp_path):
    assert newest(tmp_path) == (None, [])
    for step in (3, 7, 12):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000007", "step-00000012"]
    assert newest(tmp_path) == (12, [])
    assert checkpoints.read_manifest(tmp_path / "step-00000012")["recipe"] == "r"
    save(tmp_path, 12, value=5)  # once more
    assert float(checkpoints.read_state(tmp_path / "step-00000012", "common", CPU)["weights"][0]) == 5
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.parametrize("name", ["common.pt", "rank-0.pt", "manifest.json"])
def test_flipped_bits_are_found_and_passed_over(tmp_path, name):
    save(tmp_path, 1)
    place = save(tmp_path, 2)
    whole, numbers = (place / name).read_bytes(), random.Random(0)
    for _ in range(35):
        at = numbers.randrange(len(whole))
        broken = bytearray(whole)
        broken[at] ^= 1 << numbers.randrange(8)
        (place / name).write_bytes(broken)
        step, said = newest(tmp_path)
        assert step == 1
        assert len(said) == 1
        assert "is skipped" in said[0]


def test_what_is_missing_cut_or_other_is_said(tmp_path):
    save(tmp_path, 1)
    for what, wanted in (
        (lambda p: (p / "common.pt").unlink(), "common.pt is missing"),
        (lambda p: (p / "common.pt").write_bytes((p / "common.pt").read_bytes()[:-9]), "common.pt is damaged"),
        (lambda p: (p / "manifest.json").unlink(), "it has no manifest"),
        (lambda p: (p / "manifest.json").write_text("{"), "its manifest cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"version": 9, "files": {}}'), "it has version 9"),
        (lambda p: (p / "manifest.json").write_text('{"version": 1, "files": {}}'), "its manifest is damaged"),
    ):
        place = save(tmp_path, 2)
        what(place)
        step, said = newest(tmp_path)
        assert step == 1
        assert wanted in said[0]
    (tmp_path / "latest").write_text("../../elsewhere")
    assert newest(tmp_path)[0] == 1


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("/tmp/dkfac-bomb",)


def test_nothing_in_a_file_is_run(tmp_path):
    checkpoints.write_state(tmp_path, 1, "common", {"a": Bomb()})
    place = checkpoints.commit(tmp_path, 1, {})
    with pytest.raises(ValueError, match="could run code when it is loaded") as refusal:
        checkpoints.read_state(place, "common", CPU)
    assert "weights_only" not in str(refusal.value)
    assert not os.path.exists("/tmp/dkfac-bomb")


SAVER = """
import sys, torch
from pathlib import Path
from dkfac.tools.recipes import checkpoints
folder = Path(sys.argv[1])
for step in range(2, 10**6):
    checkpoints.write_state(folder, step, "common", {"weights": torch.full((200_000,), float(step)), "step": step})
    checkpoints.write_state(folder, step, "rank-0", {})
    checkpoints.commit(folder, step, {"recipe": "r", "world_size": 1})
    if step == 2:
        print("ready", flush=True)
"""


def kill_while_saving(folder, pause):
    with subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
    said = []
    place = checkpoints.newest(folder, said)
    assert place is not None
    state = checkpoints.read_state(place, "common", CPU)
    assert float(state["weights"].min()) == float(state["weights"].max()) == state["step"]
    return state["step"]


@pytest.mark.parametrize("number", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_kill_while_saving_leaves_a_whole_one(tmp_path, number):
    save(tmp_path, 1)
    numbers = random.Random(number)
    for _ in range(number):
        assert kill_while_saving(tmp_path, numbers.uniform(0.0, 0.2)) >= 2


def test_a_folder_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save(tmp_path, 1)
    blocked = tmp_path / ".step-00000002.part"
    blocked.write_text("in the way")
    with pytest.raises(OSError, match="step-00000002"):
        checkpoints.write_state(tmp_path, 2, "common", {})
    checkpoints.abandon(tmp_path, 2)
    assert newest(tmp_path) == (1, [])
    shutil.rmtree(tmp_path / "step-00000001")
    assert newest(tmp_path)[0] is None


def test_the_manifest_says_what_there_is(tmp_path):
    place = save(tmp_path, 4)
    body = json.loads((place / "manifest.json").read_text())
    assert set(body["files"]) == {"common.pt", "rank-0.pt"}
    assert body["files"]["common.pt"]["bytes"] == (place / "common.pt").stat().st_size
