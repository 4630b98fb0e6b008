"""``dkfac selftest``: it passes on ranks that work, finds collectives that do not, and says what it does not show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes

import dkfac
from dkfac.comm import collectives
from dkfac.tools.cli.main import main
from dkfac.tools.selftest.run_checks import HANGS, run_selftest
from dkfac.tools.selftest.table import render, vacuous

CPU = torch.device("cpu")


def selftest_on(rank, folder):
    """A sound run, one whose all-gathers are wrong, and one whose checks take too long."""
    place, quiet = dkfac.distributed.Place(rank, 2, CPU), {"is_quick": True, "say": lambda line: None}
    sound = run_selftest(place, CPU, out=Path(folder) / "sound.json", **quiet)
    gather, left = collectives.all_gather, []

    def wrong(chunk, group):
        return gather(chunk + 1e-3 if chunk.dtype == torch.float64 else chunk, group)

    collectives.all_gather = wrong
    broken = run_selftest(place, CPU, out=Path(folder) / "broken.json", **quiet)
    collectives.all_gather = gather
    how = quiet | {"timeout": 1e-3, "leave": left.append}
    run_selftest(place, CPU, out=Path(folder) / f"slow-{rank}.json", **how)
    return sound, broken, left


def test_two_ranks_pass_and_wrong_collectives_and_hangs_are_found(tmp_path, capsys):
    (sound, broken, left), (other, _, _) = on_processes(2, selftest_on, str(tmp_path))
    assert json.loads((tmp_path / "sound.json").read_text()) == sound
    assert (sound["passed"], sound["world_size"], sound["backend"]) == (True, 2, "gloo")
    assert [c["name"] for c in sound["checks"]] == [c["name"] for c in other["checks"]]
    assert {c["name"] for c in sound["checks"]} >= {"parity, sharded", "wire, float16", "bytes, comm-opt", "overlap"}
    assert any(c["value"] > 0 for c in sound["checks"]), "what is compared is not the same object"
    sent = next(c["bytes"] for c in sound["checks"] if c["name"] == "bytes, comm-opt")
    assert set(sent) == {"all_gather", "all_reduce", "exchange", "largest", "reduce_scatter"}
    assert all(timing["seconds"] > 0 for timing in sound["timings"])
    assert not broken["passed"]
    assert "parity, comm-opt" in {c["name"] for c in broken["checks"] if not c["passed"]}
    assert HANGS in left
    assert json.loads((tmp_path / "slow-0.json").read_text())["hung"]
    text = render(sound)
    assert "parity, sharded" in text
    assert "FAILED" not in text
    assert "FAILED" in render(broken)
    assert "not shown: backend gloo: nothing is shown of NCCL" in text


def test_what_a_report_does_not_show_is_said():
    report = {"world_size": 1, "backend": "nccl", "device": "NVIDIA H200", "num_hosts": 1, "checks": []}
    one, host = vacuous(report)
    assert "one rank: parity, bytes and timings are of collectives with itself" in one
    assert "one host" in host
    refused = {"name": "overlap", "refused": "overlap=True with NCCL: ..."}
    assert vacuous(report | {"world_size": 8, "num_hosts": 2, "checks": [refused]}) == [
        "overlap was refused, as it should be, and not run"
    ]
    assert any("CPU" in text for text in vacuous(report | {"device": "cpu"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "it needs ranks: start it as torchrun --nproc-per-node N -m dkfac selftest"),
        (["--timeout", "0"], "--timeout 0.0: must be a number of seconds > 0"),
        (["-o", "/nowhere/at/all.json"], "-o /nowhere/at/all.json: must be a file in a folder that exists"),
    ],
)
def test_wrong_calls_are_refused(options, said, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["selftest", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_whole_test_under_torchrun(tmp_path, world_size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["-m", "dkfac", "selftest", "-o", str(tmp_path / "report.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["passed"], report["world_size"]) == (True, world_size)
    assert ("not shown: one rank" in done.stdout) == (world_size == 1)
