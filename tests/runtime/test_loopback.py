"""DKFAC_LOOPBACK=1: a process group of one rank takes the path of several, for benchmarks on one GPU."""

import pytest
import torch
from helpers_parity import EXACT, SGD, build, train
from helpers_ranks import on_threads
from helpers_settings import arranged

from dkfac import KFAC
from dkfac.runtime.connect import LOOPBACK

CASES = [
    {},
    {"solver": "warm-eigen", "curvature": "adaptive"},
    {"solver": "cholesky"},
    {"net": "wide", "block_dim": 8, "adam": True},
]
SENT = {"factors", "header", "replicas", "means", "status", "decompositions"}


def stages(rank=0):
    model = build()
    with KFAC(model, torch.optim.SGD(model.parameters(), **SGD), **arranged(EXACT | {"strategy": "comm-opt"})) as kfac:
        return {transfer["stage"] for transfer in kfac.report()["transfers"]}


def test_one_rank_sends_to_itself_what_several_send(monkeypatch):
    assert on_threads(1, stages) == [set()]
    monkeypatch.setenv(LOOPBACK, "1")
    assert stages() == set(), "without torch.distributed there is no group"
    several = on_threads(2, stages)[0]
    assert on_threads(1, stages)[0] == several == SENT


@pytest.mark.parametrize("options", CASES, ids=str)
def test_its_steps_are_those_of_one_process(options, monkeypatch):
    expected = train(**options)
    monkeypatch.setenv(LOOPBACK, "1")
    (found,) = on_threads(1, lambda rank: train(**options))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
