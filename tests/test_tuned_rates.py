"""Which runs the study of tuned rates asks for, and what it concludes, on made-up runs."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import tuned_rates as tuned

BEST = {"alone": 0.5, "former": 1.25, "today": 1.25}
WHOLE = {"whole": 1.25}
"""Is trained at the rates of others, so its own best is never looked for."""


def made_up(config, best=BEST, factor=0.1):
    away = abs(math.log(config["lr"] / (best | WHOLE)[config["arm"]]))
    return {"config": config, "loss": 1 + factor * away + 0.01 * config["seed"], "error_rate": 0.1}


def play(names, best=BEST):
    """Finish what is asked for until nothing new is; return the runs in the order in which they were asked for."""
    runs = []
    while missing := [c for c in tuned.wanted(runs, names, 3) if c not in [run["config"] for run in runs]]:
        runs += [made_up(c, best) for c in missing]
    return runs


def test_rates_are_tried_with_one_seed_and_the_best_get_two_more():
    configs = [run["config"] for run in play(["resnet18"])]
    assert len(configs) == 3 * 5 + 4 * 2 + 2 * 3
    assert all(c["seed"] == 0 for c in configs[:15])
    later = {(c["arm"], c["lr"], c["seed"]) for c in configs[15:]}
    chosen = [*BEST.items(), ("today", BEST["alone"])]
    whole = {("whole", BEST[arm], seed) for arm in ("alone", "today") for seed in range(3)}
    assert later == {(arm, lr, seed) for arm, lr in chosen for seed in (1, 2)} | whole


@pytest.mark.parametrize(("extreme", "further"), [(0.01, [0.032, 0.013]), (100.0, [8.0, 20.0])])
def test_all_arms_get_rates_beyond_an_end_that_is_the_best_of_one(extreme, further):
    runs = play(["resnet18"], BEST | {"former": extreme})
    found = tuned.Found("resnet18", runs, tiny=False)
    assert set(found.rates) == {*tuned.CASES["resnet18"].rates, *further}
    assert found.rates == sorted(found.rates)
    assert len([r for r in runs if r["config"]["seed"] == 0 and r["config"]["arm"] != "whole"]) == 3 * 7
    assert found.table(3)["former"]["at_edge"]


def test_runs_with_other_settings_are_not_taken_for_the_studys_own():
    (config, *_), run = tuned.wanted([], ["vit"], 3), {"loss": 0.0, "error_rate": 0.0}
    other = config | {"size": config["size"] | {"steps": 3}}
    assert tuned.Found("vit", [run | {"config": other}], tiny=False).runs == {}
    assert tuned.Found("vit", [run | {"config": config}], tiny=False).runs != {}


def test_the_verdict_compares_medians(capsys):
    found = tuned.Found("resnet18", play(["resnet18"]), tiny=False)
    verdict = tuned.judge({"resnet18": found.table(3)})["resnet18"]
    assert verdict["today_above_former"]["loss"] == verdict["today_above_whole"]["loss"] == 0
    assert verdict["at_alone_above_today"]["loss"] == pytest.approx(0.1 * math.log(2.5) / 1.01)
    said = capsys.readouterr().out
    assert "no worse" in said
    assert "+9.07%" in said
    assert "MORE THAN 1%" in said


def test_a_failed_run_counts_as_an_infinite_loss():
    runs = play(["resnet18"])
    failed = [{"config": r["config"], "error": "no"} if r["config"]["lr"] == 3.2 else r for r in runs]
    assert tuned.Found("resnet18", failed, tiny=False).best() == BEST


@pytest.mark.long
def test_a_machine_begins_what_follows_from_its_runs_and_nothing_after_its_time(tmp_path):
    lines = tmp_path / "lines"
    wanted = lambda runs: [{"n": n} for n in range(min(len(runs) + 2, 5))]  # noqa: E731
    machine = tuned.Machine(None, echo, 2, 60, [], lines, "cpu")
    try:
        assert machine.follow(wanted)
    finally:
        machine.close()
    assert sorted(run["config"]["n"] for run in machine.runs) == [0, 1, 2, 3, 4]
    assert len(lines.read_text().splitlines()) == 5
    late = tuned.Machine(None, echo, 1, 0, machine.runs[:4], None, "cpu")
    try:
        assert not late.follow(wanted, grace=10)
    finally:
        late.close()
    assert len(late.runs) == 4


@pytest.mark.long
def test_a_machine_does_not_wait_for_what_a_killed_process_was_training():
    machine = tuned.Machine(None, killed_at_1, 2, 60, [], None, "cpu")
    try:
        assert not machine.run([{"n": 0}, {"n": 1}, {"n": 2}])
    finally:
        machine.close()
    assert [run["config"]["n"] for run in machine.runs] == [0, 2]


def killed_at_1(config, data, device):
    if config["n"] == 1:
        time.sleep(0.5)  # the run before is on its way to the parent
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(config, data, device)


def echo(config, data, device):
    return {"config": config, "loss": 0.0}
