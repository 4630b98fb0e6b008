"""The report page: its numbers against hand-made run folders, what it refuses, what it survives, and how it renders."""

import argparse
import base64
import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from helpers_plan import LISTS, linear
from hypothesis import given, settings
from hypothesis import strategies as st

import dkfac
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.program import expand
from dkfac.tools.cli import report
from dkfac.tools.report_page.chart import Axes, Series, line_chart
from dkfac.tools.report_page.groups import group
from dkfac.tools.report_page.html import Html, number, tag
from dkfac.tools.report_page.page import SECTIONS, build_page
from dkfac.tools.report_page.read import read_run_folder, real
from dkfac.tools.report_page.scale import fit_scale, labels, thin
from dkfac.tools.report_page.stages import parts_of

EVIL = "<script>document.title='bad'</script>\"'&"
LAYERS = [linear("first", 8, 27), linear(EVIL, 16, 72), linear("head", 10, 65)]
ACCURACIES = {"sgd": [0.5, 0.8, 0.9, 0.95], "kfac": [0.7, 0.96, 0.97, 0.94]}
VOID = {"meta", "link", "input", "br"}


def write_run(folder, kind="kfac", *, seed=0, plan=None, tests=None, steps=40, evil=False, **hyper):
    """A folder as ``dkfac train`` writes it: a test every 10 steps, a step of 10 ms with SGD and 15 with K-FAC."""
    folder.mkdir(parents=True)
    is_kfac, each = kind == "kfac", 0.015 if kind == "kfac" else 0.010
    settings = {"factor_interval": 5, "inverse_interval": 10, "staleness": "fixed", "damping": 1e-3}
    about = {"recipe": "digits-cnn", "hyper": {"lr": 0.1, "seed": seed, **hyper}, "kfac": settings if is_kfac else None}
    about |= {"optimizer": "SGD", "world_size": 2, "num_steps": steps, "command": ""}
    (folder / "settings.json").write_text(json.dumps(about))
    (folder / "environment.json").write_text(json.dumps({"date": f"2026-01-0{seed + 1}", "device": "cpu"}))
    lines = []
    for step in range(1, steps + 1):
        at = {"step": step, "epoch": step / 10, "seconds": each * step}
        figures = {"step": float(step), "damping": 1e-3, "grad_norm": 2.0, "update_norm": 1 / step, "clip_factor": 0.5,
                   "refreshes": step // 10 + 0.0, "fallbacks_float64": 0.0, "skipped_batches": 3.0}  # fmt: skip
        more = {"kfac": figures} if is_kfac else {}
        lines.append({"kind": "step", **at, "loss": 2 / step, "lr": 0.1, **more})
        if step % 10 == 0:
            accuracy = (tests or ACCURACIES[kind])[step // 10 - 1]
            lines.append({"kind": "test", **at, "loss": 1 - accuracy, "accuracy": accuracy})
            if is_kfac:
                one = {"kind": "spectrum", "step": step, "layer": EVIL if evil else "first", "factor": "A"}
                lines.append({**one, "eigenvalues": [10.0, 1.0, 0.1, 0.0], "condition": 100.0})
    lines.append({"kind": "end", "step": steps, "reason": "done"})
    write_lines(folder, lines)
    body = {"peak_memory_bytes": [1.5e9, 1.6e9]}
    if is_kfac:
        body |= {"kfac": kfac_report(plan, steps), "layers": "KFAC: 3 layers"}
        body |= {} if plan is None else {"plan": json.loads(plan.to_json())}
    (folder / "summary.json").write_text(json.dumps(body))
    return folder


def write_lines(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def kfac_report(plan, steps):
    transfers = () if plan is None else expand(plan).transfers
    told = [{"stage": t.stage, "how": t.how, "num_ranks": len(t.group), "dtype": t.dtype, "bytes": t.num_bytes(0),
             "padding_bytes": t.padding_bytes} for t in transfers if 0 in t.group]  # fmt: skip
    seconds = {"capture": 0.08, "average": 0.02, "decompose": 0.04, "precondition": 0.04}
    return {"steps": steps, "counters": {"refreshes": 4}, "stage_seconds": seconds, "rank": 0, "world_size": 2,
            "total_memory_bytes": 12345, "transfers": told}  # fmt: skip


@pytest.fixture
def plan():
    return make_plan(LAYERS, 2, Choices(strategy="layer-wise"))


@pytest.fixture
def runs(tmp_path, plan):
    """Both settings, everything that a page can show, hostile names."""
    write_run(tmp_path / "runs" / "sgd", "sgd")
    folder = write_run(tmp_path / "runs" / "kfac", plan=plan, evil=True)
    spans = [{"rank": r, "stage": s, "stream": w, "begin": 0.01 * i, "end": 0.01 * i + 0.01}
             for r in range(2) for i, (s, w) in enumerate([("forward", "work"), (EVIL, "network")])]  # fmt: skip
    timelines = [{"title": "measured", "spans": spans}, {"title": "simulated", "spans": spans}]
    (folder / "timeline.json").write_text(json.dumps(timelines))
    return tmp_path / "runs"


class Reader(HTMLParser):
    """Tables as text by section, and what a page is made of; refuses elements that do not close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.count, self.attributes, self.tables = [], defaultdict(int), [], defaultdict(list)
        self.section, self.words = None, defaultdict(str)
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.count[name] += 1
        self.attributes += attributes
        if name == "section":
            self.section = dict(attributes)["id"]
        if name == "table":
            self.tables[self.section].append([])
        if name == "tr":
            self.tables[self.section][-1].append([])
        if name in ("td", "th"):
            self.tables[self.section][-1][-1].append("")
        if name == "small":
            self.handle_data(" | ")
        self.open += [] if name in VOID else [name]

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        self.words[self.section] += text
        if {"td", "th"} & set(self.open[-3:]):
            self.tables[self.section][-1][-1][-1] += text

    def table(self, section, place=0):
        """A table as {row: {column: cell}}."""
        head, *rows = self.tables[section][place]
        return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_every_section_is_there_when_there_is_data_for_it(runs):
    text, count = build_page([runs])
    reader = Reader(text)
    assert count == 2
    assert list(reader.words)[1:] == [key for key, _, _ in SECTIONS]
    assert all(len(words) > 100 for words in list(reader.words.values())[1:])


def test_a_first_order_run_alone_has_no_sections_on_kfac(tmp_path):
    reader = Reader(build_page([write_run(tmp_path / "sgd", "sgd")])[0])
    assert set(reader.words) - {None} == {"result", "curves", "settings"}


def test_the_result_is_what_the_folders_say(runs):
    result = Reader(build_page([runs])[0]).table("result")
    assert result["test accuracy, final"] == {"K-FAC": "94.00%", "SGD": "95.00%"}
    assert result["test accuracy, best"] == {"K-FAC": "97.00%", "SGD": "95.00%"}
    assert result["test loss, final"] == {"K-FAC": "0.06", "SGD": "0.05"}
    assert result["epochs to test accuracy 95.00%"] == {"K-FAC": "2 | 0.50 × SGD", "SGD": "4"}
    assert result["seconds to test accuracy 95.00%"] == {"K-FAC": "0.3 | 0.75 × SGD", "SGD": "0.4"}
    assert result["ms per step, median"] == {"K-FAC": "15", "SGD": "10"}


def test_seeds_are_one_column_with_their_spread_and_who_fails_is_said(tmp_path):
    finals = {0: 0.95, 1: 0.97, 2: 0.93}
    for seed, last in finals.items():
        write_run(tmp_path / f"s{seed}", "sgd", seed=seed, tests=[0.5, 0.6, 0.7, last])
        write_run(tmp_path / f"k{seed}", seed=seed, tests=[0.5, 0.6, 0.94 + 0.01 * seed, 0.9])
    reader = Reader(build_page([tmp_path])[0])
    result = reader.table("result")
    assert result["test accuracy, final"]["SGD"] == "95.00% | 93.00% to 97.00%"
    assert result["epochs to test accuracy 95.00%"] == {"K-FAC": "3 | 0.75 × SGD | by 2 of 3 runs",
                                                        "SGD": "4 | by 2 of 3 runs"}  # fmt: skip
    assert set(reader.table("result", 1)["steps"]) == {f"{n}, seed {s}" for n in ("SGD", "K-FAC") for s in finals}


def test_without_accuracy_the_loss_is_the_target(tmp_path):
    for kind in ("sgd", "kfac"):
        folder = write_run(tmp_path / kind, kind)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        write_lines(folder, [{key: value for key, value in line.items() if key != "accuracy"} for line in lines])
    result = Reader(build_page([tmp_path])[0]).table("result")
    assert "test accuracy, final" not in result
    assert result["epochs to test loss 0.05"] == {"K-FAC": "2 | 0.50 × SGD", "SGD": "4"}


def test_settings_that_differ_name_the_groups_and_are_listed(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.3)):
        for seed in range(2):
            write_run(tmp_path / f"{name}{seed}", seed=seed, lr=lr)
    groups = group([read_run_folder(path) for path in sorted(tmp_path.iterdir())])
    assert [(one.label, len(one.runs), one.number) for one in groups] == [
        ("K-FAC, lr=0.1", 2, 0),
        ("K-FAC, lr=0.3", 2, 1),
    ]
    differing = Reader(build_page([tmp_path])[0]).table("settings")
    assert list(differing) == ["hyper.lr", "hyper.seed"]
    assert list(differing["hyper.lr"].values()) == ["0.1", "0.1", "0.3", "0.3"]


def test_stages_and_the_rest_are_the_mean_step_also_after_a_resume(tmp_path):
    folder = write_run(tmp_path / "kfac")
    assert parts_of(read_run_folder(folder)) == pytest.approx(
        {"capture": 2.0, "average": 0.5, "decompose": 1.0, "precondition": 1.0, "rest of the step": 10.5}
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 21)
    lines.insert(place, json.dumps({"kind": "resume", "step": 20}))  # the timer began anew there
    write_lines(folder, map(json.loads, lines))
    assert parts_of(read_run_folder(folder))["capture"] == pytest.approx(4.0)
    assert sum(parts_of(read_run_folder(folder)).values()) == pytest.approx(15.0)


def test_bytes_on_the_wire_are_those_of_the_plans_program(runs, plan):
    text = build_page([runs])[0]
    program, unit = expand(plan), 1e3
    for name, kind in (("ordinary", (False, False)), ("factor", (True, False)), ("refresh", (True, True))):
        wanted = sum(t.num_bytes(0) for t in program.of(0, measures=kind[0], decomposes=kind[1]))
        shown = re.findall(rf"<title>{name} step, [a-z]+: ([\d.,e-]+) kB per step", text)
        assert sum(float(value.replace(",", "")) for value in shown) == pytest.approx(wanted / unit, rel=1e-2), name


def test_the_picture_of_the_plan_says_who_does_what(runs, plan):
    reader = Reader(build_page([runs])[0])
    picture = reader.table("plan")
    assert list(picture) == ["first", EVIL, "head"]
    for layer, placement in zip(plan.layers, plan.placements, strict=True):
        for rank in range(2):
            does = [f.key for f, by in zip(layer.factors, placement.decomposed_by, strict=True) if rank in by]
            does += ["P"] if rank in placement.preconditioned_by else []
            assert picture[layer.name][f"rank {rank}"] == ("".join(does) or "·")
    memory = reader.table("plan", 2)
    assert memory["rank 0"]["factors (plan)"] == f"{plan.memory_bytes(0)['factors'] / 1e3:.3g} kB"
    assert memory["rank 1"]["peak of the process"] == "1.6 GB"


def test_a_large_plan_and_a_foreign_one_do_not_break_the_page(tmp_path):
    big = make_plan(LISTS["resnet50"], 80, Choices(strategy="hybrid-opt"))
    folder = write_run(tmp_path / "kfac", plan=big)
    reader = Reader(build_page([folder])[0])
    assert "Not shown: ranks from 64 on" in reader.words["plan"]
    summary = json.loads((folder / "summary.json").read_text())
    for foreign in ({**summary["plan"], "version": 99}, {"version": 2}, []):
        (folder / "summary.json").write_text(json.dumps({**summary, "plan": foreign}))
        assert "cannot be drawn" in Reader(build_page([folder])[0]).words["plan"]


def test_nothing_from_a_file_is_markup(runs):
    settings = json.loads((runs / "kfac" / "settings.json").read_text())
    settings |= {"recipe": EVIL, EVIL: EVIL, "optimizer": EVIL, "command": "\ud800"}
    (runs / "kfac" / "settings.json").write_text(json.dumps(settings))
    (runs / "sgd" / "environment.json").write_text(json.dumps({"device": EVIL, "date": EVIL}))
    text = build_page([runs])[0]
    reader = Reader(text)
    assert text.encode()
    assert EVIL in reader.words["plan"], "positive control: it is there, as text"
    assert (reader.count["script"], reader.count["style"], reader.count["title"] > 1) == (1, 1, True)
    assert [name for name, _ in reader.attributes if name.startswith("on")] == []
    assert tag("b", EVIL, title=EVIL).count("<") == 2
    assert tag("b", Html("<i></i>")) == "<b><i></i></b>"


def test_the_page_loads_nothing_and_runs_its_own_script_alone(runs):
    text = build_page([runs])[0]
    links = [value for name, value in Reader(text).attributes if name in ("src", "href", "srcset", "action")]
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert re.search(r"url\(|@import|fetch\(|XMLHttp|import\(", text) is None
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'" in text


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 1e308, "text", True, [1], {}])
def test_values_that_are_no_numbers_leave_gaps(runs, bad):
    path = runs / "kfac" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[3::7]:
        for name in ("loss", "accuracy", "seconds", "lr", "condition", "eigenvalues", "kfac"):
            if name in line:
                line[name] = {**line["kfac"], "damping": bad, "grad_norm": bad} if name == "kfac" else bad
    write_lines(runs / "kfac", lines)
    text = build_page([runs])[0]
    drawn = [value for name, value in Reader(text).attributes if name in ("d", "x1", "cx", "cy", "width", "data-y")]
    assert not re.search(r"nan|inf|None", " ".join(drawn))
    loss = re.search(r'Training loss</figcaption>.*?d="([^"]*)"[^>]*data-label="K-FAC"', text, re.DOTALL).group(1)
    assert loss.count("M") > 2


def test_all_values_missing_is_no_chart_and_one_value_is_a_dot():
    assert line_chart("t", [Series("a", [1, 2], [None, None], "red")], Axes("x", "y")) == ""
    assert line_chart("t", [Series("a", [1, 2], [0.0, -1.0], "red")], Axes("x", "y", True)) == ""
    assert 'h0"' in line_chart("t", [Series("a", [5], [7.0], "red")], Axes("x", "y"))


def test_a_long_run_is_thinned(tmp_path):
    folder = write_run(tmp_path / "kfac")
    lines = [json.dumps({"kind": "step", "step": i, "epoch": i / 100, "seconds": i / 50, "lr": 0.1,
                         "loss": 9.0 if i == 77_777 else 1 + i % 7 / 10}) for i in range(1, 100_001)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = build_page([folder])[0]
    assert len(text) < 500_000
    loss = re.search(r'Training loss</figcaption>.*?d="([^"]*)"', text, re.DOTALL).group(1)
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", loss)
    assert 300 < len(points) <= 502
    assert sum(float(y) < 50 for _, y in points) == 1, "the peak is kept"


numbers = st.one_of(st.none(), st.floats().map(real))


@settings(deadline=None, derandomize=True)
@given(st.lists(numbers, max_size=80), st.integers(4, 40))
def test_thinning_keeps_the_ends_and_the_extremes(ys, most):
    points = thin(list(range(len(ys))), ys, most)
    assert len(points) <= max(most, 1) + 1
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    known = [y for y in ys if y is not None]
    kept = [y for _, y in points if y is not None]
    assert (not known and not kept) or (min(known), max(known)) == (min(kept), max(kept))
    assert all(points[i] == (x, ys[x]) for i, x in ((0, 0), (-1, len(ys) - 1)) if ys)


@settings(deadline=None, derandomize=True)
@given(st.lists(numbers, min_size=1), st.booleans())
def test_scales_hold_their_values_and_ticks(values, is_log):
    scale = fit_scale(values, 10, 110, is_log=is_log)
    known = [v for v in values if v is not None and (v > 0 or not is_log)]
    assert (scale is None) == (not known)
    if scale is None:
        return
    assert all(9.99 <= scale(value) <= 110.01 for value in known)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(a < b for a, b in itertools.pairwise(ticks))
    assert all(9.9 <= scale(tick) <= 110.1 for tick in ticks)
    assert all(len(told) <= 12 for told in labels(ticks))


def test_numbers_are_written_for_people():
    assert [number(v) for v in (None, math.nan, 0.0, 0.00001234, 12345.6, 1.23456, 2e9)] == [
        "–", "–", "0", "1.234e-5", "12,346", "1.235", "2.000e9"]  # fmt: skip
    assert labels([0, 20_000, 40_000]) == ["0", "20k", "40k"]
    assert labels([1e-6, 1e-3, 1]) == ["1e-6", "1e-3", "1e0"]


# --- the command ---------------------------------------------------------------------------------------------


def command(*arguments):
    parser = argparse.ArgumentParser()
    report.add_report_command(parser.add_subparsers())
    chosen = parser.parse_args(["report", *map(str, arguments)])
    return chosen.run(chosen)


def test_the_command_writes_the_page_of_folders_and_folders_of_them(runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command(runs, runs / "sgd", "-o", out) == 0
    assert re.match(rf"wrote {re.escape(str(out))}: 2 runs, \d+ kB", capsys.readouterr().out)
    assert out.read_text() == build_page([runs])[0]
    assert command(runs.parent, "-o", out) == 0  # as `dkfac report runs/` after a comparison
    assert f"wrote {out}: 2 runs" in capsys.readouterr().out


def test_what_is_wrong_is_said_with_where_and_what_to_do(runs, tmp_path):
    out, folder = tmp_path / "page.html", runs / "kfac"
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()

    def refused(*arguments):
        with pytest.raises(ValueError, match=r".") as caught:
            command(*arguments, "-o", out)
        assert not out.exists()
        return str(caught.value)

    said = refused(tmp_path / "nowhere")
    assert "nowhere is not a run folder: it is not a folder" in said
    assert "use the --out of `dkfac train`" in said
    (tmp_path / "empty").mkdir()
    assert "has no settings.json and metrics.jsonl" in refused(tmp_path / "empty")
    metrics.write_text(whole[:-20])  # a run that was killed while it wrote
    assert command(folder, "-o", tmp_path / "killed.html") == 0
    metrics.write_text(f'{whole}{{"kind": "st\n{whole}')
    said = refused(folder)
    assert f"{metrics} is truncated or damaged at line {len(whole.splitlines()) + 1}" in said
    assert said.endswith("delete that line")
    metrics.write_text("")
    assert f"{metrics} has no entries yet" in refused(folder)
    metrics.write_text(whole)
    for wrong in ("{", '[{"title": "x"}]', "{}", '[{"title": "x", "spans": [{"rank": 0}]}]', "3"):
        (folder / "timeline.json").write_text(wrong)
        if wrong != "{}":
            assert str(folder / "timeline.json") in refused(folder), wrong
    (folder / "timeline.json").unlink()
    (folder / "summary.json").write_text("{")
    said = refused(folder)
    assert f"{folder / 'summary.json'} is not JSON" in said
    assert said.endswith("delete it")
    (folder / "settings.json").write_text("{")
    said = refused(folder)
    assert said.startswith(f"{folder / 'settings.json'} is not JSON")
    assert said.endswith(f"correct it, or omit {folder}"), "no resume writes it anew"
    with pytest.raises(ValueError, match=r"metrics.jsonl: the page is HTML; use a name that ends in .html"):
        command(folder, "-o", metrics)
    with pytest.raises(ValueError, match="there is no folder"):
        command(folder, "-o", tmp_path / "no" / "page.html")


def test_a_run_that_cannot_be_shown_is_left_out_of_a_folder_of_runs_and_named(runs, tmp_path, capsys):
    metrics = runs / "kfac" / "metrics.jsonl"
    metrics.write_text("")
    assert command(runs, "-o", tmp_path / "page.html") == 0
    said = capsys.readouterr()
    assert ": 1 run," in said.out
    assert said.err.startswith(f"dkfac report: skipped: {metrics} has no entries yet")
    with pytest.raises(ValueError, match="no entries yet"):
        command(runs, runs / "kfac", "-o", tmp_path / "none.html")
    (runs / "sgd" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no entries yet"):
        command(runs, "-o", tmp_path / "none.html")


def test_a_run_under_way_or_stopped_is_shown_and_said(runs):
    folder = runs / "kfac"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "summary.json").unlink()
    write_lines(folder, lines[:5])
    words = Reader(build_page([runs])[0]).words[None]
    assert "kfac has not ended: it is at step 5 of 40" in words
    assert "kfac has no summary.json yet" in words
    write_lines(folder, [*lines[:5], {"kind": "end", "step": 5, "reason": "SIGTERM"}])
    assert "kfac was stopped at step 5 of 40 (SIGTERM)" in Reader(build_page([runs])[0]).words[None]
    settings = json.loads((folder / "settings.json").read_text())
    del settings["num_steps"]
    (folder / "settings.json").write_text(json.dumps(settings))
    assert "kfac was stopped at step 5 (SIGTERM)" in Reader(build_page([runs])[0]).words[None]


def test_a_real_run_is_read(tmp_path):
    from dkfac.tools.recipes.every import RECIPES
    from dkfac.tools.recipes.job import TrainingJob
    from dkfac.tools.recipes.training import train_recipe

    recipe, place = RECIPES["digits-cnn"], dkfac.distributed.Place(0, 1, torch.device("cpu"))
    settings = {"announce": False, "factor_interval": 1, "inverse_interval": 2, "experimental": {"staleness": "change"}}
    for name, kfac in (("sgd", None), ("kfac", settings)):
        train_recipe(
            TrainingJob(recipe=recipe, hyper=recipe.hyper, kfac=kfac, folder=tmp_path / name, max_steps=3), place
        )
    reader = Reader(build_page([tmp_path])[0])
    assert set(reader.words) - {None} == {key for key, _, _ in SECTIONS} - {"timeline", "wire"}
    assert reader.table("result")["steps"] == {"K-FAC": "3", "SGD": "3"}
    assert "Refresh intervals by factor" in reader.words["control"]


# --- how it looks --------------------------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear_ = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear_[0] + 0.7152 * linear_[1] + 0.0722 * linear_[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out_in_both_modes(mode):
    css = (Path(dkfac.__file__).parent / "tools" / "report_page" / "page.css").read_text()
    colours = dict(
        re.findall(r"--([\w]+): (#\w{6})", css.split("@media (prefers-color-scheme: dark)")[mode].split("* {")[0])
    )
    ground = luminance(colours["bg"])
    needed = {"fg": 7, "dim": 4.5, "link": 4.5, "warn": 4.5, "early": 3, "late": 3} | {f"c{i}": 3 for i in range(9)}
    for name, least in needed.items():
        light, dark = sorted([luminance(colours[name]), ground], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= least, name


CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
PROBE = """<!DOCTYPE html><title>not yet</title>
<iframe src="report.html" style="width:390px;height:800px"></iframe>
<iframe src="report.html" style="width:1200px;height:800px"></iframe>
<script>addEventListener("load", () => {
  document.title = JSON.stringify([...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow;
    const shown = () => [...page.querySelectorAll(".by")].filter((e) => e.offsetWidth).map((e) => e.className);
    const before = shown();
    page.querySelector("#by-seconds").click();
    const svg = page.querySelector(".by-seconds svg.lines"), box = svg.getBoundingClientRect();
    const where = { clientX: box.left + box.width / 2, clientY: box.top + 20 };
    svg.dispatchEvent(new view.PointerEvent("pointermove", where));
    const size = parseFloat(view.getComputedStyle(svg).fontSize) * box.width / 380;
    return { ready: root.dataset.ready, error: root.dataset.error || null, before, after: shown(), size,
             width: root.clientWidth, needs: root.scrollWidth, title: page.title,
             loaded: view.performance.getEntriesByType("resource").length,
             reading: page.querySelector("#reading").textContent };
  }));
});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (Debian: apt-get install chromium)")
def test_chromium_shows_it_on_a_phone_and_a_screen(runs, tmp_path):
    command(runs, "-o", tmp_path / "report.html")
    (tmp_path / "probe.html").write_text(PROBE)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--window-size=1300,900",
    ]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, (tmp_path / "probe.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search(r"<title>(.*?)</title>", done.stdout).group(1))
    assert [one["width"] for one in found] == [390, 1200]
    for one in found:
        assert (one["ready"], one["error"], one["loaded"]) == ("yes", None, 0)
        assert one["needs"] == one["width"], "the page itself does not scroll sideways"
        assert one["title"] == "dkfac: digits-cnn"
        assert (one["before"], one["after"]) == (["by by-step"], ["by by-seconds"])
        assert one["size"] >= 10, "text in charts, in pixels"
        assert re.match(r"training time, s: 0\.\d+K-FAC: \d+(\.\d+)?SGD: \d", one["reading"]), one["reading"]
