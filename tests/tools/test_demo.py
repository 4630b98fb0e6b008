"""The demo: the same data and start for both sides, an honest verdict, flags that are refused early."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dkfac.tools.recipes import demo, digits

ROOT = Path(__file__).parents[2]


def curve(*accuracies: float, pace: float = 0.5) -> list[digits.Point]:
    return [digits.Point(i, pace * i, 1.0, 1.0, accuracy) for i, accuracy in enumerate(accuracies, 1)]


EARLY, LATE = curve(0.97), curve(0.9, 0.96, 0.98)


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


# --- what is said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sgd", "kfac", "expected"),
    [
        ([LATE, LATE], [EARLY, EARLY], "In epochs, K-FAC wins: 1.00 against 3.00, 67% less, in 2 of 2 seeds."),
        ([EARLY, EARLY], [LATE, LATE], "In epochs, SGD wins: 1.00 against 3.00, 67% less, in 2 of 2 seeds."),
        ([EARLY, EARLY], [EARLY, EARLY], "In epochs, a draw: 1.00 each."),
        (
            [LATE, EARLY],
            [EARLY, curve(0.9, 0.97)],
            "K-FAC is ahead: 1.50 against 2.00, 25% less, in 1 of 2 seeds, which",
        ),
        ([LATE], [EARLY], "K-FAC is ahead: 1.00 against 3.00, 67% less, in 1 of 1 seeds, which may be chance."),
        ([curve(0.9)], [curve(0.97)], "K-FAC wins: 97% was reached by SGD in 0 and by K-FAC in 1 of 1 runs"),
        ([curve(0.97)] * 2, [curve(0.9), curve(0.97)], "SGD wins: 97% was reached by SGD in 2 and by K-FAC in 1 of 2"),
        ([curve(0.9)], [curve(0.9)], "no verdict: 97% was reached by SGD in 0 and by K-FAC in 0 of 1 runs"),
    ],
)
def test_the_verdict_names_the_winner_the_difference_and_the_seeds(sgd, kfac, expected):
    assert expected in demo.target_verdict({"SGD": sgd, "K-FAC": kfac}, "epochs")


def test_who_wins_in_epochs_may_lose_in_seconds():
    curves = {"SGD": [curve(0.9, 0.97, pace=0.1)] * 2, "K-FAC": [curve(0.97, pace=0.4)] * 2}
    assert demo.target_verdict(curves, "epochs").startswith("In epochs, K-FAC wins")
    assert demo.target_verdict(curves, "seconds").startswith("In seconds, SGD wins")


def test_the_end_is_judged_by_the_last_accuracy():
    curves = {"SGD": [curve(0.9, 0.99), curve(0.98)], "K-FAC": [curve(0.99, 0.97), curve(0.99)]}
    assert demo.accuracy_verdict(curves) == "Final accuracy: SGD is ahead, 98.5% against 98.0%, in 1 of 2 seeds."
    assert demo.accuracy_verdict({"SGD": [EARLY], "K-FAC": [EARLY]}) == "Final accuracy: a draw, 97.0% each."


def test_the_table_says_when_the_target_was_missed():
    text = demo.target_table({"SGD": [curve(0.9), curve(0.97)], "K-FAC": [curve(0.97, 0.99), curve(0.9, 0.98)]})
    header, sgd, kfac = text.splitlines()
    assert header.split("  ")[-1] == "seconds per epoch"
    assert "reached in 1 of 2" in sgd
    assert "1.50 (1.00 to 2.00)" in kfac
    assert "98.5%" in kfac


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
    for expected in (
        "epochs to 97%",
        "seconds to 97%",
        "final accuracy",
        "SGD",
        "K-FAC",
        "In epochs",
        "In seconds",
        "Final accuracy: ",
    ):
        assert expected in result.stdout
    assert "[2/2] seed 0 K-FAC" in result.stderr
    assert result.stderr.count("dkfac: ") == 1
    image = (tmp_path / "new" / "folder" / "digits.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--epochs", "0"), "epochs='0' is not an integer from 1 to 200"),
        (("--epochs", "ten"), "epochs='ten' is not an integer from 1 to 200"),
        (("--seeds", "21"), "seeds='21' is not an integer from 1 to 20"),
        (("--seeds=-1",), "seeds='-1' is not an integer from 1 to 20"),
        (("--out", "pyproject.toml"), "out='pyproject.toml' cannot be created as a folder"),
        (("--out", "pyproject.toml/deeper"), "out='pyproject.toml/deeper' cannot be created as a folder"),
        (("--speed", "9"), "unrecognized arguments: --speed"),
    ],
)
def test_a_bad_flag_is_refused_with_code_2_before_anything_starts(flags, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(digits, "load_digit_images", lambda *_: pytest.fail("started"))
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
    with pytest.raises(RuntimeError, match=r"pip install 'dkfac\[demo\]'"):
        digits.load_digit_images()
