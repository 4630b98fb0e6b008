"""The demo: the same data and start for both sides, an honest verdict, flags that are refused early."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dkfac.tools.recipes import autoencoder, demo, demo_training, digits

ROOT = Path(__file__).parents[2]


def curve(*losses: float, pace: float = 0.5) -> list[demo_training.DemoPoint]:
    return [demo_training.DemoPoint(10 * i, pace * i, loss) for i, loss in enumerate(losses, 1)]


EARLY, LATE, SLOW = curve(0.3, 0.25), curve(0.5, 0.4, 0.3), curve(0.6, 0.5, 0.25)


def execute(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "dkfac.tools.recipes.demo", *flags]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)


# --- data ----------------------------------------------------------------------------------------------------


def test_no_image_is_on_both_sides_of_a_split_and_validation_leaves_the_test_images_out():
    test, validation = digits.load_digit_images("test"), digits.load_digit_images("validation")
    assert len(test.held_out_labels) + len(test.train_labels) == 1797
    assert len(validation.held_out_labels) + len(validation.train_labels) == len(test.train_labels)
    # The labels are in one fixed order, so what "validation" uses is the tail that "test" trains on.
    assert torch.equal(torch.cat([validation.held_out_labels, validation.train_labels]), test.train_labels)


def test_the_training_images_are_standardised():
    images = digits.load_digit_images().train_images
    assert images.shape[1:] == (1, 8, 8)
    assert abs(images.mean()) < 1e-5
    assert abs(images.std() - 1) < 1e-5


def test_batches_repeat_with_the_seed_and_each_epoch_sees_each_label_once():
    data = digits.load_digit_images()
    recipe = digits.DigitsConfig(epochs=2, seed=3)
    first, second = (list(digits.batches(data, recipe)) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    half = torch.cat([labels for _, labels in first[: len(first) // 2]])
    assert torch.equal(half.bincount(), data.train_labels.bincount())
    other = list(digits.batches(data, digits.DigitsConfig(epochs=2, seed=4)))
    assert not torch.equal(first[0][1], other[0][1])


def test_a_shifted_image_is_the_image_moved_by_at_most_a_pixel():
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(50, 1, 1, 1)
    shifted = digits._shift(images, torch.Generator().manual_seed(0))
    padded = torch.zeros(10, 10)
    padded[1:9, 1:9] = images[0, 0]
    candidates = torch.stack([padded[y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    matches = (shifted == candidates[None]).all(-1).all(-1)
    assert torch.equal(matches.sum(1), torch.ones(50, dtype=torch.long))
    assert matches.any(0).all()


# --- training ------------------------------------------------------------------------------------------------


def test_both_sides_start_from_the_same_weights_and_see_the_same_batches(monkeypatch):
    seen: list[list[torch.Tensor]] = []
    build = digits.build_model

    def spy(seed, **options):
        model = build(seed, **options)
        seen.append([p.detach().clone() for p in model.parameters()])
        model.register_forward_pre_hook(lambda m, args: seen[-1].append(args[0].clone()) if m.training else None)
        return model

    monkeypatch.setattr(digits, "build_model", spy)
    recipe = digits.DigitsConfig(epochs=1, seed=5)
    for options in (None, {"announce": False}):
        digits.train_digits(digits.load_digit_images(), recipe, options)
    assert len(seen[0]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_curve_has_four_points_an_epoch_and_learns(batch_norm):
    points = digits.train_digits(
        digits.load_digit_images(), digits.DigitsConfig(epochs=3, batch_norm=batch_norm), {"announce": False}
    )
    assert len(points) == 12
    assert points[-1].epochs == 3
    assert all(a.seconds < b.seconds for a, b in pairwise(points))
    assert points[-1].accuracy > 0.9


def test_the_schedule_rises_to_its_peak_and_falls_to_almost_zero():
    values = [digits._triangle(step, 100) for step in range(100)]
    assert values.index(max(values)) in (9, 10)
    assert max(values) == pytest.approx(1, abs=0.02)
    assert values[-1] < 0.02
    assert all(value > 0 for value in values)


def test_both_arms_of_the_demo_start_from_the_same_weights_and_see_the_same_batches(monkeypatch):
    seen: list[list[torch.Tensor]] = []
    build = demo_training.build_autoencoder

    def spy(seed):
        model = build(seed)
        seen.append([p.detach().clone() for p in model.parameters()])
        model.register_forward_pre_hook(
            lambda m, args: seen[-1].append(args[0].clone()) if len(args[0]) < 400 else None
        )
        return model

    monkeypatch.setattr(demo_training, "build_autoencoder", spy)
    for arm in demo_training.ARMS:
        demo_training.train_autoencoder(autoencoder.load_images(), replace(arm, steps=7), 5)
    assert len(seen[0]) == 16 + 7
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_the_images_of_the_demo_are_in_range_and_apart():
    train, test = autoencoder.load_images()
    assert train.shape[1] == test.shape[1] == 64
    assert train.min() >= 0
    assert max(train.max(), test.max()) == 1


def test_a_curve_of_the_demo_ends_with_the_last_step_and_its_seconds_leave_tests_out():
    times = iter(range(100))
    arm = replace(demo_training.ARMS[0], steps=20)
    points = demo_training.train_autoencoder(autoencoder.load_images(), arm, 0, clock=lambda: float(next(times)))
    assert [point.steps for point in points] == list(range(1, 21))
    assert [point.seconds for point in points] == [float(i) for i in range(1, 21)]


# --- what is said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "other", "expected"),
    [
        (
            [LATE, LATE],
            [EARLY, EARLY],
            "K-FAC wins: {} after 0.5 s, AdamW after 1.5 s; K-FAC is faster in 2 of 2 seeds.",
        ),
        ([EARLY] * 2, [SLOW] * 2, "AdamW wins: {} after 1.5 s, AdamW after 1.0 s; K-FAC is faster in 0 of 2 seeds."),
        ([EARLY, EARLY], [EARLY, LATE], "AdamW wins: {} in 1 of 2 seeds."),
    ],
)
def test_the_verdict_names_the_winner_the_seconds_and_the_seeds(alone, other, expected):
    said = demo.verdicts({"AdamW": alone, "K-FAC": other})[0]
    assert said == "In seconds, " + expected.format("K-FAC comes to AdamW's lowest loss")


def test_the_end_is_judged_by_the_last_loss():
    curves = {"AdamW": [curve(0.2, 0.3), curve(0.3)], "K-FAC": [curve(0.4, 0.25), curve(0.4)]}
    said = "In the final test loss, AdamW wins: K-FAC 0.3250, AdamW 0.3000; K-FAC is lower in 1 of 2 seeds."
    assert demo.verdicts(curves)[1] == said


def test_the_table_has_means_and_ranges():
    header, alone, other = demo.result_table({"AdamW": [LATE, EARLY], "K-FAC": [EARLY, EARLY]}).splitlines()
    assert header.split("  ")[-1] == "seconds in all"
    assert "0.2750 (0.2500 to 0.3000)" in alone
    assert "0.2500 (0.2500 to 0.2500)" in other


def test_off_a_terminal_the_progress_is_a_line_per_run_and_on_one_a_bar(capsys):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    for stream in (sys.stderr, terminal := Terminal()):
        progress = demo.ProgressBar(stream, num_parts=2)
        for name in ("SGD", "K-FAC"):
            progress.show(name, 0.5, "epoch 1")
            progress.show(name, 1.0, "epoch 2")
            progress.next_part()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines] == [["[1/2]", "SGD", "epoch", "2"], ["[2/2]", "K-FAC", "epoch", "2"]]
    assert "\r" in terminal.text
    assert " 25%" in terminal.text
    assert "100%" in terminal.text
    assert "\n" not in terminal.text


# --- the program ---------------------------------------------------------------------------------------------


def test_the_quick_demo_prints_a_table_and_a_verdict_and_writes_a_plot(tmp_path):
    result = execute("--quick", "--out", str(tmp_path / "new" / "folder"))
    assert result.returncode == 0, result.stderr
    for expected in ("final test loss", "seconds in all", "AdamW", "K-FAC", "In seconds, ", "In the final test loss, "):
        assert expected in result.stdout
    assert "[2/2] seed 0 K-FAC" in result.stderr
    assert result.stderr.count("dkfac: ") == 1
    image = (tmp_path / "new" / "folder" / "autoencoder.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--seeds", "ten"), "seeds='ten' is not an integer from 1 to 20"),
        (("--seeds", "21"), "seeds='21' is not an integer from 1 to 20"),
        (("--seeds=-1",), "seeds='-1' is not an integer from 1 to 20"),
        (("--out", "pyproject.toml"), "out='pyproject.toml' cannot be created as a folder"),
        (("--out", "pyproject.toml/deeper"), "out='pyproject.toml/deeper' cannot be created as a folder"),
        (("--speed", "9"), "unrecognized arguments: --speed"),
    ],
)
def test_a_bad_flag_is_refused_with_code_2_before_anything_starts(flags, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "load_images", lambda: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        demo.run_demo(flags)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_missing_package_is_a_sentence_that_names_the_extra(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert demo.run_demo(["--quick", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert package in error
    assert "pip install scikit-learn matplotlib" in error
    assert "Traceback" not in error


def test_the_data_alone_name_the_extra_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match="pip install scikit-learn"):
        digits.load_digit_images()
