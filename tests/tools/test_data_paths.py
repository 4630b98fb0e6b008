"""Data on the wrong path: what is no text, no picture, of another size, colour or class; figures of a recipe's own."""

import bz2
import gzip
import lzma
import pickle
import random
import tarfile
from dataclasses import replace

import numpy
import pytest
import torch
from helpers_pictures import write_folder
from PIL import Image
from test_pictures import write_cifar, write_idx
from test_recipes import ALONE, job, lines

from dkfac.tools.cli.main import main
from dkfac.tools.recipes import char_gpt
from dkfac.tools.recipes.every import RECIPES
from dkfac.tools.recipes.readers import Pictures, read_pictures
from dkfac.tools.recipes.resnet import build_cifar_resnet
from dkfac.tools.recipes.training import train_recipe

VERSE = "to be or not to be, that is the question. "


def refused(capsys, recipe, *options):
    """Return the one line that a command ends with, besides what it says it begins."""
    assert main(["train", recipe, "--steps", "1", *map(str, options)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if ", into " not in line]
    assert len(said) == 1, said
    return said[0]


def load(name, path, **hyper):
    recipe = RECIPES[name]
    return recipe.load(str(path), replace(recipe.hyper, **hyper))


def steps(name, folder, data, **options):
    train_recipe(job(name, folder, data=str(data), kfac=None, batch=6, epochs=1.0, **options), ALONE)
    return len(lines(folder, "step"))


WORDS = " ".join("".join(random.Random(i).choices("abcdefgh", k=9)) for i in range(500)).encode()
CYRILLIC = "быть или не быть, вот в чём вопрос. " * 20


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tar.gz", gzip.compress(WORDS)),
        ("a.txt", gzip.compress(WORDS)),
        ("a.bz2", bz2.compress(WORDS).replace(b"\0", b"\xff")),
        ("a.txt.xz", lzma.compress(WORDS)),
        ("a.txt", VERSE.encode("utf-16")),
        ("a.txt", CYRILLIC.encode("koi8-r")),
    ],
    ids=["tar.gz", "gz", "bz2", "xz", "utf-16", "koi8-r"],
)
@pytest.mark.parametrize("where", ["file", "folder"])
def test_what_is_no_text_is_not_trained_on(tmp_path, capsys, name, content, where):
    file = tmp_path / (name if where == "file" else "a.txt")
    file.write_bytes(content)
    (tmp_path / "b.txt").write_text(VERSE * 200)
    line = refused(capsys, "char-gpt", "--data", file if where == "file" else tmp_path, "--out", tmp_path / "run")
    assert f"{file} is not text in UTF-8: unpack" in line


def test_a_text_with_a_few_foreign_bytes_is_text(tmp_path):
    (tmp_path / "a.txt").write_bytes((VERSE.encode() + b"caf\xe9\r\n") * 3)
    assert char_gpt.read_text(tmp_path / "a.txt") == (VERSE + "caf\n") * 3


def test_texts_that_cannot_be_used_are_refused(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    data = ("--data", tmp_path / "text", "--out", tmp_path / "run")
    (tmp_path / "text/a.rst").write_text(VERSE)
    assert "has no .py, .txt, .md files: set --data to" in refused(capsys, "char-gpt", *data)
    (tmp_path / "text/a.md").write_text(VERSE)
    assert "to test, but needs more than 128 of each: use more text" in refused(capsys, "char-gpt", *data)


@pytest.mark.parametrize("number", [1, 2, 7, 19])
def test_of_few_texts_the_last_twentieth_is_held_out(tmp_path, number):
    for i in range(number):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 1000)
    for hidden in ("._00.txt", ".git/config.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"\0\5\x16\7")  # as macOS writes them
    train_set, test_set = load("char-gpt", tmp_path, more={**RECIPES["char-gpt"].hyper.more, "context": 20})
    assert (len(train_set.characters), len(test_set.characters)) == (950 * number, 50 * number)
    assert test_set.num_kinds == number + 1
    assert test_set.characters[-1] == number


def test_of_many_texts_every_twentieth_is_held_out_if_there_is_enough_of_it():
    trained, held = char_gpt.split_text([chr(ord("a") + i % 20) * 50 for i in range(40)], 10)
    assert held == "t" * 100
    assert len(trained) == 38 * 50
    trained, held = char_gpt.split_text(["x" * 50] * 19 + [""], 10)
    assert (len(trained), len(held)) == (902, 48)


@pytest.mark.parametrize(
    ("recipe", "figure", "words"),
    [
        ("char-gpt", "context=0", "context=0 is not an integer >= 1"),
        ("char-gpt", "layers=[1]", "layers=[1] is not an integer >= 1"),
        ("char-gpt", "width=2.5", "width=2.5 is not an integer >= 1"),
        ("char-gpt", "heads=None", "heads=None is not an integer >= 1"),
        ("char-gpt", "heads=3", "a width of 128 cannot be divided equally"),
        ("cifar10-resnet32", "depth=True", "depth=True is not an integer >= 1"),
        ("imagenet-resnet50", "width=0", "width=0 is not an integer >= 1"),
        ("imagenet-resnet50-large-batch", "width=-1", "width=-1 is not an integer >= 1"),
        ("imagenet-resnet50-large-batch", "row=[1]", "row=[1] is not an integer >= 1"),
        ("imagenet-resnet50-large-batch", "row=0", "row=0 is not an integer >= 1"),
    ],
)
def test_figures_of_a_recipes_own_are_checked_before_anything_starts(capsys, tmp_path, recipe, figure, words):
    line = refused(capsys, recipe, "--more", figure, "--data", tmp_path / "nowhere")
    assert line.startswith("dkfac train: --more ")
    assert words in line


@pytest.mark.parametrize("depth", [2, -4])
def test_a_resnet_has_blocks(depth):
    with pytest.raises(ValueError, match="6n"):
        build_cifar_resnet(depth)


def test_large_pictures_of_one_size_want_a_size(tmp_path, capsys):
    write_folder(tmp_path / "in", sizes=[(100, 80)], number=2, suffix="png")
    line = refused(capsys, "cifar10-resnet32", "--data", tmp_path / "in", "--out", tmp_path / "run")
    assert "the images have 100 x 80 pixels, more than 64: set the size" in line
    assert "for example --size 32" in line
    train_set, _ = load("cifar10-resnet32", tmp_path / "in", size=16)
    assert train_set.get(torch.tensor([0]), seed=None)[0].shape == (1, 3, 16, 16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", ["cifar10-resnet32", "fashion-cnn"])
def test_the_picture_of_another_size_is_named(tmp_path, capsys, packed, recipe):
    data = tmp_path / "in"
    write_folder(data, sizes=[(20, 20)], number=4, suffix="png")
    Image.new("RGB", (24, 18)).save(data / "train/class1/2.png")
    if packed:
        with tarfile.open(tmp_path / "in.tar", "w") as archive:
            archive.add(data, "in")
        data = tmp_path / "in.tar"
    line = refused(capsys, recipe, "--data", data, "--out", tmp_path / "run")
    assert "train/class1/2.png has 24 x 18 pixels" in line
    assert "train/class0/0.png has 20 x 20 pixels" in line
    assert "--size" in line
    assert len(load(recipe, data, size=16)[0].get(torch.arange(12), seed=None)[0]) == 12


def test_hidden_files_are_no_pictures(tmp_path):
    write_folder(tmp_path, sizes=[(8, 8)], number=2, suffix="png")
    for name in ("train/class0/._0.png", "val/class1/._0.png", "train/.ipynb_checkpoints/0.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0\5\x16\7")
    train_set, test_set = read_pictures(tmp_path)
    assert (len(train_set), len(test_set)) == (6, 3)
    assert train_set.classes == ("class0", "class1", "class2")


def write_fashion(folder, *, side=28, labels=10, test_side=None, test_labels=None):
    numbers = numpy.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for prefix, own_side, own_labels in (("train", side, labels), ("t10k", test_side or side, test_labels or labels)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", numbers.integers(0, 255, (12, own_side, own_side)))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", numpy.arange(12) % own_labels)
    return folder


@pytest.mark.parametrize("name", ["cifar10-resnet32", "imagenet-resnet50-large-batch", "fashion-cnn"])
@pytest.mark.parametrize("colour", [False, True], ids=["grey", "colour"])
def test_grey_and_coloured_pictures_go_with_every_recipe_for_pictures(tmp_path, name, colour):
    if colour:
        write_folder(tmp_path / "in", sizes=[(14, 12)], number=4, suffix="png")
    else:
        write_fashion(tmp_path / "in", side=12)
    more = {"cifar10-resnet32": {"depth": 8}, "fashion-cnn": {}}.get(name, {"width": 2, "row": 4096})
    assert steps(name, tmp_path / "run", tmp_path / "in", more=more) == 2


def test_classes_are_as_many_as_the_data_has(tmp_path, capsys):
    assert steps("fashion-cnn", tmp_path / "run", write_fashion(tmp_path / "in", side=8, labels=12)) == 2
    write_fashion(tmp_path / "in", side=8, labels=5, test_labels=7)
    line = refused(capsys, "fashion-cnn", "--data", tmp_path / "in", "--out", tmp_path / "other")
    assert "has test images of class 6 and training images up to class 4" in line


def test_fashion_cnn_wants_one_size(tmp_path, capsys):
    options = "--data", write_fashion(tmp_path / "in", side=8, test_side=12), "--out", tmp_path / "run"
    assert "have 8 x 8 and 12 x 12 pixels" in refused(capsys, "fashion-cnn", *options)
    assert "have 2 x 2 and 2 x 2 pixels" in refused(capsys, "fashion-cnn", *options, "--size", "2")
    assert steps("fashion-cnn", tmp_path / "run", tmp_path / "in", size=9) == 2


def test_pictures_in_memory_are_brought_to_the_size_that_is_asked_for(tmp_path):
    (tmp_path / "cifar").mkdir()
    write_cifar(tmp_path / "cifar")
    whole, _ = load("cifar10-resnet32", tmp_path / "cifar")
    assert whole.get(torch.arange(3), seed=1)[0].shape == (3, 3, 32, 32)
    for split in load("cifar10-resnet32", tmp_path / "cifar", size=16):
        pixels, _ = split.get(torch.arange(3), seed=1)
        assert (pixels.shape, pixels.dtype) == ((3, 3, 16, 16), torch.uint8)
        assert abs(float(pixels.float().mean() - split.pixels[:3].float().mean())) < 2
    wide = torch.zeros(1, 1, 4, 12, dtype=torch.uint8)
    wide[..., 4:6], wide[..., 6:8] = 40, 200  # the middle is a square of two halves
    found, _ = Pictures(torch.zeros(1), ("a",), wide).sized(2).get(torch.tensor([0]), seed=None)
    assert found[0, 0, 0].tolist() == pytest.approx([62.9, 177.1], abs=1)  # bilinear: 6/7 of the one, 1/7 of the other


@pytest.mark.parametrize(("side", "asked", "found"), [(20, None, 20), (20, 32, 32), (90, None, 224), (90, 40, 40)])
def test_recipes_for_imagenet_leave_small_pictures_as_they_are_unless_asked(tmp_path, side, asked, found):
    write_folder(tmp_path, sizes=[(side, side)], number=2, classes=1)
    for name in ("imagenet-resnet50", "imagenet-resnet50-large-batch"):
        pixels, _ = load(name, tmp_path, size=asked)[0].get(torch.arange(2), seed=0)
        assert pixels.shape == (2, 3, found, found)


def pack(folder, name, mode):
    write_folder(folder / "in", sizes=[(40, 40)], number=4, suffix="png")
    with tarfile.open(folder / name, mode) as archive:
        archive.add(folder / "in", "in")
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "mode"), [("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz"), ("a.tar.bz2", "w:bz2"), ("a.tar", "w")]
)
@pytest.mark.parametrize("damage", ["other", "short", "flipped"])
def test_a_damaged_archive_is_one_line(tmp_path, capsys, name, mode, damage):
    content = pack(tmp_path, name, mode)
    flipped = content[:200] + b"\xff" * 3000 + content[3200:]
    broken = {"other": b"no archive", "short": content[: len(content) // 2], "flipped": flipped}
    (tmp_path / name).write_bytes(broken[damage])
    line = refused(capsys, "cifar10-resnet32", "--data", tmp_path / name, "--out", tmp_path / "run")
    assert name in line
    assert line.endswith("download it again")


FEW = numpy.zeros((3, 3072), dtype="uint8")


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([1, 2, 3]),
        pickle.dumps({b"data": [1, 2], b"labels": [0]}),
        pickle.dumps({b"data": FEW, b"labels": [0, 1]}),
        pickle.dumps({b"data": FEW, b"labels": [0, -1, 2]}),
        pickle.dumps({b"data": FEW, b"labels": ["a", "b", "c"]}),
        pickle.dumps({b"data": FEW.astype("float64"), b"labels": [0, 1, 2]}),
        pickle.dumps({b"data": FEW[:0], b"labels": []}),
        pickle.dumps({b"data": FEW, b"labels": [0, 1, 2]})[:500],
        b"no pickle",
        None,
    ],
    ids=["list", "no array", "labels", "below 0", "words", "floats", "empty", "short", "no pickle", "folder"],
)
def test_what_is_no_batch_of_cifar_is_one_line(tmp_path, capsys, content):
    data = tmp_path / "cifar"
    data.mkdir()
    write_cifar(data)
    (data / "data_batch_1").unlink()
    if content is None:
        (data / "data_batch_1").mkdir()
    else:
        (data / "data_batch_1").write_bytes(content)
    line = refused(capsys, "cifar10-resnet32", "--data", data, "--out", tmp_path / "run")
    assert "data_batch_1 is not a batch of CIFAR-10's python version" in line
    assert line.endswith("download it again")


HOSTILE = """
def ndarray(*args):
    open("ran", "w").close()
"""


@pytest.mark.parametrize("module", ["numpy_of_mine", "numpy.mine"])
def test_a_batch_that_names_a_module_of_its_own_runs_nothing(tmp_path, capsys, monkeypatch, module):
    """Modules whose names begin like numpy's were imported, and their functions called."""
    write_cifar(tmp_path)
    (tmp_path / "numpy_of_mine.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"c" + module.encode() + b"\nndarray\n)R.")
    line = refused(capsys, "cifar10-resnet32", "--data", tmp_path, "--out", tmp_path / "run")
    assert f"it asks for {module}.ndarray, which no array needs" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_every_pickle_protocol_are_read(tmp_path, protocol):
    write_cifar(tmp_path)
    content = pickle.dumps({b"data": FEW, b"labels": [0, 1, 2]}, protocol=protocol)
    (tmp_path / "data_batch_1").write_bytes(content)
    assert read_pictures(tmp_path)[0].labels[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(bytes(5000))[:-9], None, gzip.compress(b"\0\0\x08\3" + bytes(12))],
    ids=["other", "short", "folder", "empty"],
)  # fmt: skip
def test_what_is_no_idx_file_is_one_line(tmp_path, capsys, content):
    data = write_fashion(tmp_path / "in", side=4)
    (data / "train-images-idx3-ubyte").unlink()
    if content is None:
        (data / "train-images-idx3-ubyte.gz").mkdir()
    else:
        (data / "train-images-idx3-ubyte.gz").write_bytes(content)
    line = refused(capsys, "fashion-cnn", "--data", data, "--out", tmp_path / "run")
    assert "train-images-idx3-ubyte.gz" in line
    assert line.endswith("download it again")


def test_a_broken_picture_is_named_in_a_folder_and_in_an_archive(tmp_path, capsys):
    write_folder(tmp_path / "in", sizes=[(8, 8)], number=2, suffix="png")
    picture = tmp_path / "in/train/class0/1.png"
    picture.write_bytes(picture.read_bytes()[:60])
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        archive.add(tmp_path / "in", "in")
    for data, name in ((tmp_path / "in", str(picture)), (tmp_path / "in.tar", "in.tar: in/train/class0/1.png")):
        line = refused(capsys, "fashion-cnn", "--data", data, "--out", tmp_path / "run")
        assert f"{name} cannot be read as an image" in line


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("digits-cnn", "size"),
        ("char-gpt", "size"),
        ("autoencoder", "label-smoothing"),
        ("fashion-cnn", "label-smoothing"),
        ("imagenet-resnet50-large-batch", "warmup"),
    ],
)
def test_options_without_effect_are_refused(capsys, tmp_path, name, option):
    line = refused(capsys, name, f"--{option}", "1" if option == "size" else "0.5", "--out", tmp_path / "run")
    assert f"--{option}: {name} does not use it" in line
