"""The pages of the documentation: their code runs, their commands parse, their figures, messages and links are true."""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers_ranks import on_processes
from torch import nn

import dkfac
from dkfac.config.row import rows_by_name
from dkfac.config.settings import Settings
from dkfac.experimental.settings import ExperimentalSettings
from dkfac.tools.cli import train
from dkfac.tools.cli.main import Parser, main
from dkfac.tools.cli.run import read_options

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = [*PAGES, *sorted((ROOT / "docs/notes").glob("*.md"))]
ON_RANKS = {"distributed.md": 2}
"""Pages whose code runs on several processes."""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int
    mark: str
    """A comment right before it."""


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = re.finditer(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    before = page.read_text()
    return [Block(m[2], m[3], before[: m.start(3)].count("\n"), m[1] or "") for m in found]


def name_of(page: Path) -> str:
    return page.name


# --- code ----------------------------------------------------------------------------------------------------


def stand_ins() -> dict[str, object]:
    """Return what the README leaves to its reader: imports, a model, data, a logger."""

    class MyModel(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    class Logger:
        def log(self, figures: dict[str, float]) -> None:
            assert all(isinstance(value, float) for value in figures.values())

    loader = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
    names = {"MyModel": MyModel, "loader": loader, "logger": Logger(), "loss_fn": nn.functional.cross_entropy}
    return {"torch": torch, "dkfac": dkfac, "model": MyModel(), **names}


def can_run(block: Block) -> bool:
    """Whether a block is to be run, and the package that it needs, if any, can be imported."""
    if not block.mark.startswith("needs: "):
        return not block.mark.startswith("not run: ")
    try:
        importlib.import_module(block.mark.removeprefix("needs: "))
    except ImportError:
        return False
    return True


def run_code(page: Path, folder: Path, *, looks: bool = True) -> int:
    """Run a page's Python, all in one namespace, as if it stood in ``folder``; returns how many blocks ran.

    ``looks``: compare what is printed with the blocks that are marked as output.
    """
    namespace = stand_ins() if page.name == "README.md" else {}
    printed, number, here = "", 0, Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks(page):
            if block.kind == "python" and can_run(block):
                said = io.StringIO()
                code = compile("\n" * block.line + block.text, str(page), "exec")
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
                    if block.mark.startswith("needs: "):
                        warnings.simplefilter("ignore")  # the other package's own
                    exec(code, namespace)
                printed, number = said.getvalue(), number + 1
            elif block.mark == "output" and looks:
                options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                same = doctest.OutputChecker().check_output(block.text, printed, options)
                assert same, f"{page.name}, line {block.line}: not what is printed:\n{printed}"
    finally:
        os.chdir(here)
        torch.set_default_dtype(torch.float32)
    return number


def run_code_of(rank: int, name: str, folder: str) -> int:
    return run_code(ROOT / "docs" / name, Path(folder), looks=rank == 0)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind == "python" for b in blocks(p))], ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path):
    if page.name in ON_RANKS:
        assert min(on_processes(ON_RANKS[page.name], run_code_of, page.name, str(tmp_path))) > 0
    else:
        assert run_code(page, tmp_path) > 0


def test_code_that_is_not_run_is_rare_and_says_why():
    skipped = [b.mark for page in PAGES for b in blocks(page) if b.kind == "python" and b.mark.startswith("not run")]
    assert len(skipped) <= 3
    assert all(len(mark) > len("not run: ") + 10 for mark in skipped)


def test_every_fence_is_seen_here():
    for page in PAGES:
        fences = re.findall(r"^\s*```", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), f"{page.name} has a block that is indented or not closed"


# --- commands ------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """The command line was understood."""


def commands() -> list[tuple[str, list[str]]]:
    """Return the dkfac commands of all shell blocks, with or without torchrun before them."""
    found = []
    for page in EVERY_PAGE:
        for block in blocks(page):
            if block.kind not in ("", "sh", "bash", "console"):
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if re.search(r"(^|-m )dkfac ", line) else []
                if words[:1] == ["dkfac"]:
                    found.append((f"{page.name}: {line.split('  #')[0]}", words[1:]))
                elif "torchrun" in words and "dkfac" in words:
                    found.append((f"{page.name}: {line.split('  #')[0]}", words[words.index("dkfac") + 1 :]))
    return found


@pytest.mark.parametrize(("line", "words"), commands(), ids=[line for line, _ in commands()])
def test_a_command_of_the_pages_is_understood(line, words, monkeypatch):
    understand = Parser.parse_args

    def parse_only(self, *args, **kwargs):
        given = understand(self, *args, **kwargs)
        if given.command in ("train", "compare") and given.recipe and getattr(given, "script", None) is None:
            train.read_job(given, kfac=True, folder=Path("run"))  # what of recipe and settings is checked before a run
        if given.command == "run":
            read_options(given)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        main(words)


def test_settings_that_the_pages_name_take_the_values_they_name():
    rows = [*rows_by_name(Settings).items(), *rows_by_name(ExperimentalSettings).items()]
    allowed = {name: [choice for other, row in rows if other == name for choice in row.choices] for name, _ in rows}
    known = {name for name, choices in allowed.items() if choices}
    number = 0
    for page in PAGES:
        for name, value in re.findall(r'`(?:[^`\n]*[ (])?(\w+)="([\w-]+)"[^`\n]*`', page.read_text()):
            if name in known and name in allowed:
                number += 1
                assert value in allowed[name], f'{page.name}: {name}="{value}"'
    assert number > 50


# --- figures -------------------------------------------------------------------------------------------------


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def cifar(name: str, label: str) -> list[float]:
    return sorted(run["test"] for run in result(name)["runs"] if run["config"]["label"] == label)


def percents(values: list[float]) -> str:
    return " and ".join(f"{value:.1%}" for value in values)


def digits(name: str, **wanted: object) -> dict:
    rows = [row for row in result(name)["rows"] if all(row[key] == value for key, value in wanted.items())]
    assert len(rows) == 1, rows
    return rows[0]


def final(name: str, optimizer: str, lr: float, fraction: float = 1.0) -> float:
    for run in result(name)["runs"]:
        c = run["config"]
        if (c["optimizer"], c["lr"], c["seed"], c["fraction"]) == (optimizer, lr, 0, fraction):
            return run["final"]
    raise AssertionError((name, optimizer, lr))


def ended(row: dict) -> str:
    middle, *spread = (100 * value for value in (row["median"], row["tests"][0], row["tests"][-1]))
    return f"{middle:.1f} ({spread[0]:.1f} to {spread[1]:.1f}), {row['seconds']:.1f} s"


def figures() -> dict[str, list[str]]:
    """Return, by page, what stands there of benchmarks, made from their results."""
    found: dict[str, list[str]] = {"choose.md": [], "distributed.md": [], "recipes.md": [], "../README.md": []}
    choose = found["choose.md"]

    study = result("cifar_optimizers_h200")["table"]
    cases = {f"resnet{n} batch {b}": f"ResNet-{n}, batch {b:,}" for n in (32, 18) for b in (128, 1024)}
    for case, title in cases.items():
        sgd = study[f"{case} sgd x1"]
        enough = [r for key, r in study.items() if key.startswith(f"{case} kfac ") and r["median"] >= sgd["median"]]
        kfac = min(enough, key=lambda row: row["epochs"])
        found["../README.md"].append(
            f"| {title} | {sgd['median']:.1%} in {sgd['seconds']:.1f} s | {kfac['median']:.1%} in {kfac['epochs']:.0f} "
            f"epochs, {kfac['seconds']:.1f} s | {kfac['epochs'] / 16:.2f} | {kfac['seconds'] / sgd['seconds']:.2f} |"
        )
    titles = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "kfac": "K-FAC"}
    for length in dict.fromkeys(key.rpartition("batch ")[2].partition(" ")[2] for key in study):
        rows = [study.get(f"{case} {length}") for case in cases]
        cells = [ended(row) if row else "" for row in rows]
        epochs = next(row["epochs"] for row in rows if row)
        choose.append(f"| {titles[length.split()[0]]}, {epochs:.0f} | {' | '.join(cells)} |")

    norm = "cifar_resnet32_h200_rescale_norm"
    choose.append(f"| SGD, 12 epochs | {percents(cifar(norm, 'sgd 12'))} |")
    choose.append(f"| SGD, 16 epochs | {percents(cifar(norm, 'sgd 16'))} |")
    for damping in ("3e-4", "1e-3", "3e-3", "1e-2"):
        both = cifar("cifar_resnet32_h200", f"global 10/100 {damping}")
        choose.append(f"| K-FAC, 12 epochs, damping {damping} | {percents(both)} |")
    collapsed = [r["test"] for r in result(norm)["runs"] if r["config"]["kfac"] is not None]
    collapsed = [r for r in collapsed if r < 0.8]
    choose.append(f'| the same, `rescale="norm"`, several settings | {min(collapsed):.0%} to {max(collapsed):.0%} |')
    fast = [r for label in ("fast", "fast, a quarter") for r in cifar("cifar_fast_path_h200", label)]
    exact = [r for label in ("eigen, exact", "cholesky, exact") for r in cifar("cifar_fast_path_h200", label)]
    choose.append(f"{min(exact):.1%} to {max(exact):.1%} exact, {min(fast):.1%} to {max(fast):.1%} fast")

    steps = {"resnet50_10_100": "ResNet-50, 10/100", "resnet50_1_10": "ResNet-50, 1/10", "vit_b": "ViT-B/16, 10/100",
             "gpt2": "GPT-2 small, 10/100", "resnet32": "ResNet-32 on CIFAR, 1/10"}  # fmt: skip
    for name, title in steps.items():
        (case,) = result(f"gpu_step_{name}_h200")["cases"].values()
        whole, part = (case["variants"][v]["ratio"] for v in ("full", "sampled"))
        choose.append(f"| {title} | {whole:.2f} | {part:.2f} |")

    for suffix, lr in (("", 0.05), ("_no_norm", 0.1)):
        epochs = []
        before = {"rescale": "norm-global", "warmup_refresh": [10, 100]}
        for kfac in (None, {}, {"damping": 1e-3}, {"damping": 1e-2}, before):
            row = digits(f"digits_confirm{suffix}_cpu", lr=lr, kfac=kfac)
            epochs.append(f"{row['epochs_to_97']:.1f} ± {row['epochs_to_97_standard_error']:.1f}")
        choose.append(f"| lr {lr} | {' | '.join(epochs)} |")
    rows = [digits("digits_confirm_cpu", kfac=kfac) for kfac in ({"rescale": "norm"}, {})]
    both = [f"{row['epochs_to_97']:.1f} ± {row['epochs_to_97_standard_error']:.1f}" for row in rows]
    choose.append(f"{both[0]} epochs against {both[1]}")
    units = [row["epochs_to_97"] for row in result("digits_defaults_cpu")["rows"] if row["axis"] == "norm_form"]
    usual = digits("digits_defaults_cpu", axis="lr", lr=0.05, kfac={})["epochs_to_97"]
    choose.append(f"{min(units):.1f} to {max(units):.1f} epochs against {usual:.1f}")
    for suffix, rates in (("", (0.05, 0.1, 0.2, 0.5)), ("_no_norm", (0.1, 0.2, 0.5))):
        for lr in rates:
            every = [digits(f"digits_early{suffix}_cpu", lr=lr, kfac=k) for k in (None, before, {})]
            ends = ["none" if r["num_missed"] == 3 else f"{r['epochs_to_97']:.1f}" for r in every]
            cells = [f"{r['accuracy']:.1%}, {end}" for r, end in zip(every, ends, strict=True)]
            choose.append(f"| {lr} | {' | '.join(cells)} |")
    late = {"factor_interval": 10, "inverse_interval": 100, "warmup_refresh": None}
    for suffix, unit in (("", "epochs_to_97"), ("_no_norm", "accuracy")):
        name = f"digits_defaults{suffix}_cpu"
        pair = [digits(name, axis="intervals", kfac=late)[unit], digits(name, axis="lr", lr=0.05 if not suffix else 0.1,
                                                                        kfac={})[unit]]  # fmt: skip
        form = "{:.1f} epochs without it, {:.1f} with it" if not suffix else "{:.0%} without it, {:.0%} with it"
        choose.append(form.format(*pair))

    vit, tiny = result("cifar_vit_small_h200"), result("char_gpt_tiny_cpu")
    for title, name in {"AdamW": "adamw", "Muon": "muon", "SOAP": "soap", "K-FAC's gradient into AdamW": "kfac-adamw",
                        "Adam in the eigenbasis": "adam-eigen"}.items():  # fmt: skip
        one, two = vit["table"][f"{name} x1"], tiny["table"][f"{name} x1"]
        first = f"{one['loss']:.3f} (lr {one['lr']:g}) | {one['seconds']:.1f} s"
        choose.append(f"| {title} | {first} | {two['loss']:.3f} (lr {two['lr']:g}) | {two['seconds']:.1f} s |")
    one, two = vit["table"]["adam-eigen x0.5"], tiny["table"]["adam-eigen x0.5"]
    first = f"{one['loss']:.3f} (lr {one['lr']:g}) | {one['seconds']:.1f} s"
    choose.append(
        f"| the same in half the steps | {first} | {two['loss']:.3f} (lr {two['lr']:g}) | {two['seconds']:.1f} s |"
    )
    shares = [s["table"]["adam-eigen x0.5"]["seconds"] / s["table"]["adamw x1"]["seconds"] for s in (vit, tiny)]
    choose.append("in {:.2f} of the time (ViT, GPU) and {:.2f} of it (GPT, CPU)".format(*shares))
    choose.append(f"at lr 0.006 its loss is {final('cifar_vit_small_h200', 'adam-eigen', 0.006):.2f}")
    pair = [result(f"{name}_early_h200")["table"] for name in ("cifar_vit_small", "char_gpt_small")]
    for title, name in {"AdamW": "adamw", "Muon": "muon", "SOAP": "soap", "K-FAC's gradient into AdamW": "kfac-adamw",
                        "Adam in the eigenbasis": "adam-eigen"}.items():  # fmt: skip
        rows = [table.get(f"{name} x{part}") for table in pair for part in ("1", "0.5")]
        cells = [f"{row['loss']:.3f} in {row['seconds']:.1f} s |" if row else "|" for row in rows]
        choose.append(f"| {title} | {' '.join(cells)}")
    shares = [table["adam-eigen x0.5"]["seconds"] / table["adamw x1"]["seconds"] for table in pair]
    choose.append("in {:.2f} of the time, on the GPT by the mean of seeds".format(*shares))
    choose.append(f"seeds that lie 0.12 apart and in {shares[1]:.2f} of it. With a tighter limit")
    half = result("char_gpt_small_half_h200")
    adamw, *short = (half["table"][name] for name in ("adamw x1", "adam-eigen@2e-5 x0.5", "adam-eigen@2e-5 x0.45"))
    choose.append(f"ends at {short[0]['loss']:.3f} in half the steps and at {short[1]['loss']:.3f}")
    kinds = (("adam-eigen@2e-5", 0.45, 0.009), ("adamw", 1, 0.003))
    ends = [[r["final"] for r in half["runs"] if tuple(r["config"][k] for k in ("optimizer", "fraction", "lr")) == kind]
            for kind in kinds]  # fmt: skip
    choose.append(f"({min(ends[0]):.3f} to {max(ends[0]):.3f}) in 0.45 of them, AdamW at {adamw['loss']:.3f} "
                  f"({min(ends[1]):.3f} to {max(ends[1]):.3f})")  # fmt: skip
    choose.append("in {:.2f} and {:.2f} of its time".format(*(s["seconds"] / adamw["seconds"] for s in short)))
    medium = [(run["config"], run["final"]) for run in result("char_gpt_medium_half_h200")["runs"]]
    means = [statistics.mean(end for config, end in medium if (config["optimizer"], config["lr"]) == chosen)
             for chosen in (("adam-eigen", 0.006), ("adamw", 0.0015))]  # fmt: skip
    choose.append("half the steps end at {:.3f}, AdamW at {:.3f}".format(*means))
    stale, long = result("char_gpt_tiny_staleness_cpu")["table"], result("char_gpt_tiny_2000_cpu")["table"]
    for name, title in {"change": "by how much each factor changed", "default": "5/5 until step 500", "1/10": "1/10",
                        "10/100": "1/10 until step 100"}.items():  # fmt: skip
        rows = [stale[f"adam-eigen@{name} x{part}"] for part in ("1", "0.5")]
        cells = [f"{row['loss']:.3f} in {row['seconds']:.1f} s |" for row in rows]
        choose.append(f"{title} | {' '.join(cells)}")
    choose.append(f"AdamW {stale['adamw x1']['loss']:.3f} in {stale['adamw x1']['seconds']:.1f} s")
    ends = [long[f"adam-eigen@{name} x1"]["loss"] for name in ("5/5", "20/20", "10/100")]
    choose.append("{:.3f} every 5 steps, {:.3f} with the default intervals, {:.3f} at 10/100".format(*ends))
    whole = {r["config"]["options"]["inverse_interval"]: r["final"] for r in result("char_gpt_clips_h200")["runs"]
             if r["config"]["steps"] == 500}  # fmt: skip
    choose.append(f"{whole[10]:.3f} at 1/10, {whole[100]:.3f} at 10/100; three seeds")
    crowd = final("char_gpt_small_12_at_a_time_h200", "adam-eigen@change", 3e-3)
    choose.append(f'An earlier version with `staleness="change"`: {crowd:.2f}')
    gpt2 = result("memory_gpt2")
    held = gpt2["kfac"]
    choose.append(
        f"{gpt2['one_copy'] / 1e9:.2f} GB for one copy of the factors, {held['adam-eigen']['total'] / 1e9:.2f} GB"
    )
    choose.append(f"{held['adam-eigen, bases in bfloat16']['total'] / 1e9:.2f} GB with bases in bfloat16")

    auto = result("autoencoder_cpu")
    ends = [auto[name]["median"] for name in ("sgd", "kfac with sgd", "levenberg-marquardt")]
    found["recipes.md"].append("SGD {:.4f} after 2,000 updates, K-FAC with SGD's length {:.4f} after 500".format(*ends))
    found["recipes.md"].append(f"`kfac.quadratic_step` {ends[2]:.4f} after 500")
    assert max(auto["levenberg-marquardt"]["updates_to_sgd"]) == 175

    network = result("network_strategies_4_hosts_1gbit_cpu")["models"]
    labels = {name: f"`{name}`" for name in ("replicated", "factor-wise", "spd", "comm-opt", "hybrid-opt", "layer-wise",
                                             "mem-opt", "sharded", "local")}  # fmt: skip
    labels |= {"sharded:overlap=True": "`sharded` with `overlap`"}
    labels |= {"sharded:wire_form='rows'": '`sharded` with `wire_form="rows"`'}
    for name, label in labels.items():
        runs = [network[m]["configurations"] for m in ("mlp", "cnn")]
        ratios = [r[name]["step_seconds"]["median"] / r["sgd"]["step_seconds"]["median"] for r in runs]
        found["distributed.md"].append("| {} | {:.1f} | {:.1f} |".format(label, *ratios))
    return found


@pytest.mark.parametrize("page", ["choose.md", "distributed.md", "recipes.md", "../README.md"])
def test_figures_are_those_of_the_committed_results(page):
    text = " ".join((ROOT / "docs" / page).read_text().split())
    missing = [figure for figure in figures()[page] if " ".join(figure.split()) not in text]
    assert not missing, "\n".join(missing)


def test_results_that_the_pages_cite_are_there():
    for page in EVERY_PAGE:
        for name in re.findall(r"(?:benchmarks/)?(results/[\w*.]+\.json)", page.read_text()):
            assert list((ROOT / "benchmarks").glob(name)), f"{page.name}: {name}"
        for name in re.findall(r"benchmarks/\w+\.py", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


# --- messages ------------------------------------------------------------------------------------------------


def said_by(node: ast.AST) -> str:
    """Return a message of the source; what is filled in at run time is an ellipsis."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(said_by(value) for value in node.values)
    return "..."


def test_messages_that_the_page_explains_are_those_of_the_source():
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "dkfac").rglob("*.py"))]
    kinds = (ast.Constant, ast.JoinedStr)
    source = [said_by(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(explained) > 60
    for message in explained:
        pieces = [piece.strip() for piece in message.split("...") if piece.strip()]
        pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        assert any(pattern.search(text) for text in source), f"nothing in dkfac says: {message}"


# --- links and the site ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = page if not path else (page.parent / path).resolve()
        assert there.is_file(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}"


def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(PAGES)
    for path in built:
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*?(?:src|href)="?([^" >]+)', path.read_text())
        fetched = [address for address in loaded if re.match(r"(https?:)?//", address)]
        assert not fetched, f"{path.name} loads {fetched[0]} from the network"


def test_the_site_has_every_page():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed == there
