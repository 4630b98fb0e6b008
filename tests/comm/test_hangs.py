"""R19, R31: a rank that does not arrive is named, with its stage, on all others, before the process group's time-out.

The group's time-out is torch's, 30 minutes; that the tests end at all shows that it is not what ends the ranks.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from helpers_ranks import on_processes
from helpers_training import RHYTHM, SHARE, batch, build
from torch.nn.parallel import DistributedDataParallel

from dkfac import KFAC
from dkfac.comm import collectives, ranks_at
from dkfac.comm.ranks_at import Sighting
from dkfac.decompose import layer_factors
from dkfac.factors import reduce

WORLD, ODD, AT = 3, 1, 4
"""Step 4 measures and refreshes."""


def stop(rank):
    """Stop this process, once it has published where it is; it is killed when the others have ended."""
    time.sleep(0.5)
    subprocess.Popen(["sh", "-c", f"sleep 5; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def train(rank, case, odd, patience):
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = KFAC(model, optimizer, strategy="comm-opt", patience=patience, **RHYTHM)

    def stopping(module, name):
        real, numbers = getattr(module, name), []

        def stops(*args, **kwargs):
            numbers.append(None)
            if rank == odd and kfac.metrics()["step"] == AT:
                stop(rank)
            return real(*args, **kwargs)

        setattr(module, name, stops)

    if case == "average":
        stopping(reduce, "local_sums")
    if case == "decompose":
        stopping(layer_factors, "refresh")
    if case == "optimizer":
        optimizer.register_step_post_hook(lambda *_: rank == odd and kfac.metrics()["step"] == AT + 1 and stop(rank))
    for step in range(AT + 3):
        if rank == odd and step == AT and case == "load":
            kfac.load_state_dict(kfac.state_dict())
        if rank == odd and step == AT and case == "forward":
            stop(rank)
        optimizer.zero_grad()
        x, y = batch(step, WORLD)
        F.cross_entropy(model(x[rank * SHARE :][:SHARE]), y[rank * SHARE :][:SHARE]).backward()
        if not (rank == odd and step == AT and case == "skip"):
            optimizer.step()


def outcome(case, odd=ODD, patience=2.0):
    """Return what each rank said; all but the stopped one end by themselves."""
    found = on_processes(WORLD, train, case, odd, patience, check=False)
    assert all(isinstance(one, tuple) and one[0] != 0 for one in found), found
    for rank, (code, _) in enumerate(found):
        assert code == 1 or (rank == odd and code == -signal.SIGKILL), f"rank {rank} ended with {code}"
    return [said for _, said in found]


def test_a_stopped_rank_is_named_with_its_stage_on_all_others():
    said = outcome("decompose")
    for rank in (0, 2):
        assert (
            "not arrived: rank 1 (does not answer: stopped, gone or cut off; last seen at step 4, decompose)"
            in (said[rank])
        ), said[rank]
        assert "waiting: ranks 0, 2 (step 4, decompose)" in said[rank]
        assert "RuntimeError: ranks waited 2 s for others" in said[rank]
        assert "TORCH_FR_BUFFER_SIZE" in said[rank]


def test_a_rank_that_skips_a_step_is_named_with_its_line_on_all():
    for text in outcome("skip"):
        assert "not arrived: rank 1 (step 4, outside K-FAC (data, forward, backward or the optimizer)" in text, text
        assert "test_hangs.py" in text
        assert "waiting: ranks 0, 2 (step 4, average)" in text


def test_a_rank_that_loads_alone_is_named_on_all():
    for text in outcome("load"):
        assert "not arrived: rank 1 (step 4, loading a state)" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("case", ["forward", "average", "decompose", "optimizer"])
def test_a_rank_stopped_in_any_phase_is_named(case, odd):
    """If it is rank 0, whose process holds the store, the others say so."""
    said = outcome(case, odd)
    where = {"forward": "step 4, outside", "optimizer": "step 5, outside"}.get(case, f"step 4, {case}")
    for rank in {0, 1, 2} - {odd}:
        assert f"not arrived: rank {odd}" in said[rank], said[rank]
        assert where in said[rank]


# --- it ends with K-FAC, and there is none where there is nothing to watch ---------------------------------------


def watch_ends(rank):
    names = [thread.name for thread in threading.enumerate()]
    kfac = KFAC(build(), announce=False)
    begun = [thread.name for thread in threading.enumerate() if thread.name.startswith("dkfac-")]
    assert collectives.guard is not collectives.plain_wait
    kfac.close()
    for thread in threading.enumerate():
        if thread.name.startswith("dkfac-"):
            thread.join(5)
    assert collectives.guard is collectives.plain_wait
    KFAC(build(), announce=False)  # left open: it must not keep the process alive
    return names, sorted(begun)


def test_the_watch_ends_with_close_and_keeps_no_process_alive():
    for before, begun in on_processes(2, watch_ends):
        assert not [name for name in before if name.startswith("dkfac-")]
        assert begun == ["dkfac-store", "dkfac-watch"]


def test_one_process_has_no_thread():
    before = threading.active_count()
    with contextlib.closing(KFAC(build(), announce=False)):
        assert threading.active_count() == before
        assert collectives.guard is collectives.plain_wait


# --- messages -----------------------------------------------------------------------------------------------------


def at(step, stage, waits=False):
    return Sighting(7, step, ranks_at.position(stage, waits), "train.py:3", waits)


def test_messages_say_who_is_late_and_who_waits():
    seen = {0: at(5, "average", True), 1: at(5, ""), 2: at(5, "average", True), 3: at(4, "precondition")}
    text = ranks_at.message(60, seen, set(), 5)
    assert "rank 1 (step 5, outside K-FAC (data, forward, backward or the optimizer), train.py:3)" in text
    assert "rank 3 (step 4, precondition), rank 4 (was never seen); waiting: ranks 0, 2 (step 5, average)" in text
    text = ranks_at.message(60, {0: at(5, "average", True), 1: at(5, "average", True)}, set(), 2)
    assert "all ranks are at step 5, average, whose transfer does not complete" in text
    text = ranks_at.without_store(60, 3, at(5, "average", True), at(5, "decompose"), held_by_rank_0=True)
    assert "not arrived: rank 0 (last seen at step 5, decompose), whose process holds it, is stopped" in text
    text = ranks_at.message(60, {rank: at(5, "", rank > 0) for rank in range(99)}, set(), 99)
    assert "waiting: ranks 1, 2, 3, 4, 5, 6, 7, 8 and 90 more (step 5, K-FAC's step)" in text
