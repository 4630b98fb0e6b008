"""roles: gradient, statistics and inverse workers under torchrun, against one process with the same staleness."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_settings import arranged
from torch import nn

import dkfac
from dkfac.workers.hub import Hub, connect_to_hub
from dkfac.workers.place import RolesPlace

ROOT = Path(__file__).parents[2]
STEPS, EVERY, LAG, BATCH = 13, 4, 2, 16
OPTIONS = {
    "announce": False,
    "warmup_refresh": None,
    "factor_interval": EVERY,
    "inverse_interval": EVERY,
    "damping": 1e-2,
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (BATCH,), generator=generator)


def statistics_batch(step):
    return batch(1000 + step)


def train(kill=False, solver="eigen", lag=LAG):
    """What a user's script is: the same on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    place = dkfac.roles(gradient=2, statistics=1, inverse=1)
    if place.serve(build, statistics_batch, F.cross_entropy):
        return None
    model = DistributedDataParallel(build(), process_group=place.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = dkfac.KFAC(model, optimizer, roles=place, inverse_lag=lag, solver=solver, **arranged(OPTIONS))
    for step in range(STEPS):
        if kill and step == EVERY + 1 and place.number == 0:
            os.kill(place.process_of("inverse"), signal.SIGKILL)
            time.sleep(0.5)
        x, y = (t.chunk(2)[place.number] for t in batch(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    refreshes = kfac.metrics()["refreshes"]
    kfac.close()
    return [p.detach() for p in model.parameters()], refreshes


class Oracle:
    """One process: factors of the statistics batch at the weights of a refresh, used from a later step on."""

    def __init__(self, lag, until=STEPS):
        self.lag, self.until, self.waiting, self.running = lag, until, [], {}

    def measure(self, model, step):
        twin = build()
        twin.load_state_dict(model.state_dict())
        options = OPTIONS | {"factor_decay": 0.0, "factor_interval": 1, "inverse_interval": 1}
        with dkfac.KFAC(twin, **arranged(options)) as kfac:
            x, y = statistics_batch(step)
            F.cross_entropy(twin(x), y).backward()
            kfac.step()
            for name, pair in kfac.factors().items():
                for key, value in pair.items():
                    old, weight = self.running.get((name, key), (0.0, 0.0))
                    self.running[name, key] = (0.95 * old + value, 0.95 * weight + 1)
        return {where: value / weight for where, (value, weight) in self.running.items()}

    def train(self):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        used = None
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for due, factors in self.waiting:
                used = factors if due == step else used
            if step % EVERY == 0 and step <= self.until:
                factors = self.measure(model, step)
                if used is None:
                    used = factors
                else:
                    self.waiting.append((step + self.lag, factors))
                    used = factors if self.lag == 0 else used
            self.precondition(model, used)
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    def precondition(self, model, used):
        before, after, moves = 0.0, 0.0, []
        for name in ("0", "2", "4"):
            layer = model.get_submodule(name)
            grad = (
                layer.weight.grad if layer.bias is None else torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            )
            A, G = used[name, "A"], used[name, "G"]
            matrix = torch.kron(G, A) + OPTIONS["damping"] * torch.eye(grad.numel(), dtype=torch.float64)
            move = torch.linalg.solve(matrix, grad.flatten()).view_as(grad)
            before, after = before + grad.square().sum(), after + move.square().sum()
            moves.append((layer, move))
        scale = (before / after).sqrt()
        for layer, move in moves:
            layer.weight.grad = scale * move[:, : layer.in_features]
            if layer.bias is not None:
                layer.bias.grad = scale * move[:, -1]


def launch(tmp_path, **options):
    """Run ``train`` under torchrun on four processes; returns what each gradient worker returned, and what was said."""
    script = tmp_path / "script.py"
    folders = [str(Path(__file__).parent), str(ROOT / "tests")]
    script.write_text(
        f"import sys, os, torch\nsys.path[:0] = {folders!r}\nimport test_roles\n"
        f"if __name__ == '__main__':\n"
        f"    found = test_roles.train(**{options!r})\n"
        f"    if found is not None: torch.save(found, {str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        f"    import gc\n    gc.collect()  # a group that a DDP still holds may abort the exit\n"
        f"    torch.distributed.destroy_process_group()\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return [torch.load(tmp_path / str(rank)) for rank in range(2)], result.stderr


@pytest.mark.parametrize("lag", [LAG, pytest.param(0, marks=pytest.mark.slow)])
def test_four_processes_equal_one_that_applies_the_same_staleness(tmp_path, lag):
    found, _ = launch(tmp_path, lag=lag)
    expected = Oracle(lag).train()
    for weights, refreshes in found:
        assert refreshes == (3 if lag else 4)  # of steps 0, 4, 8 and 12; the last is not due any more
        for p, q in zip(weights, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_killing_the_inverse_workers_child_leaves_training_running(tmp_path):
    """The refresh of step 4 was under way, or done; nothing comes after it."""
    found, said = launch(tmp_path, kill=True)
    assert "inverse worker 0" in said
    assert "training goes on with the" in said
    (first, refreshes), (second, _) = found
    assert refreshes in (1, 2)
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)
    for p, q in zip(first, build().parameters(), strict=True):
        assert torch.isfinite(p).all()
        assert not torch.equal(p, q)


def test_roles_that_do_not_fit_the_world_are_refused():
    with pytest.raises(ValueError, match=r"are 4 ranks; torch.distributed has 1"):
        dkfac.roles(gradient=2, statistics=1, inverse=1)
    with pytest.raises(ValueError, match=r"roles\(inverse=0\)"):
        dkfac.roles(gradient=2, statistics=1, inverse=0)


SECRET = b"a secret of 32 bytes for a test."


def test_a_worker_that_goes_is_noticed_and_nobody_waits_for_it():
    hub = Hub({"inverse": 2}, "127.0.0.1", SECRET)
    one, two = (connect_to_hub(hub.address, SECRET, "inverse", i) for i in range(2))
    hub.wait_for_all(10)
    hub.post(("inverse", 0), (7, "question"))
    assert one.receive(lambda: 1000) == [7, "question"]
    one.send(("done", 7, "answer"))
    assert not hub.are_there("inverse", 7)
    two.close()
    assert hub.answers("inverse", 7) == ["answer"]
    assert hub.all_of("inverse") == [("inverse", 0)]
    hub.close()
    one.close()


def test_who_never_comes_is_lost_after_a_while():
    hub = Hub({"statistics": 1}, "127.0.0.1", SECRET)
    hub.wait_for_all(0.1)
    assert "did not come" in hub.lost["statistics", 0]
    hub.close()


def test_a_model_that_is_not_the_one_that_trains_is_refused():
    from dkfac.config.settings import Settings
    from dkfac.workers.child import Inverses, compare

    device = torch.device("cpu")
    there = Inverses(build(), Settings(), device)
    wanted = {name: json.loads(json.dumps(asdict(layer.spec))) for name, layer in there.layers.items()}
    compare(there.layers, wanted)
    model = build()
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layer '0' is .* on the gradient workers and"):
        compare(Inverses(model, Settings(), device).layers, wanted)


def test_roles_that_have_ended_are_refused():

    ended = RolesPlace("gradient", 0, {}, None, None, None, "", closed=True)
    with pytest.raises(ValueError, match="these roles have ended"):
        dkfac.KFAC(build(), roles=ended)
    helper = RolesPlace("inverse", 0, {}, None, None, None, "")
    with pytest.raises(ValueError, match="this rank is a inverse worker"):
        dkfac.KFAC(build(), roles=helper)
    ready = RolesPlace("gradient", 0, {}, None, None, None, "")
    with pytest.raises(ValueError, match='staleness="fixed"'):
        dkfac.KFAC(build(), roles=ready, experimental={"staleness": "change"})


def test_what_a_helper_gets_is_moved_to_the_device_of_its_rank():
    from dkfac.workers.child import moved_to

    given = {"x": torch.ones(2), "pair": (torch.ones(1), [torch.ones(3), "text"]), "n": 1}
    found = moved_to(torch.device("meta"), given)
    assert {t.device.type for t in (found["x"], found["pair"][0], found["pair"][1][0])} == {"meta"}
    assert (found["pair"][1][1], found["n"], type(found["pair"])) == ("text", 1, tuple)
    assert moved_to(torch.device("cpu"), given) is given
    ready = RolesPlace("inverse", 0, {}, None, None, None, "", secret=b"something secret", device="cuda:1")
    assert "secret" not in repr(ready)
