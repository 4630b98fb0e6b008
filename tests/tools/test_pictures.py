"""Readers of pictures, batches of them, and ResNets as published."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import threading

import numpy
import pytest
import torch
from helpers_pictures import write_folder
from PIL import Image
from torch import nn

from dkfac.tools.recipes import pictures as images
from dkfac.tools.recipes.loading import batch_indices, micro_batches, normalize_pixels, prefetch
from dkfac.tools.recipes.readers import Pictures, read_pictures
from dkfac.tools.recipes.resnet import build_cifar_resnet, build_resnet


def write_idx(path, array):
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype("uint8").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_a_folder_of_small_pictures_is_kept_in_memory(tmp_path):
    write_folder(tmp_path, sizes=[(20, 16)], number=4, suffix="png")
    train, test = read_pictures(tmp_path)
    assert (len(train), len(test)) == (12, 6)
    assert train.classes == ("class0", "class1", "class2")
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert train.pixels.shape == (12, 3, 16, 20)
    expected = numpy.asarray(Image.open(tmp_path / "train/class1/2.png")).transpose(2, 0, 1)
    assert torch.equal(train.get(torch.tensor([6]), seed=None)[0][0], torch.from_numpy(expected.copy()))


def test_an_archive_is_the_folder(tmp_path):
    write_folder(tmp_path / "in", sizes=[(8, 8)], number=3, suffix="png", test="test")
    for name, mode in (("a.tar", "w"), ("a.tar.xz", "w:xz"), ("a.tgz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(tmp_path / "in", "some/where")
        for found, expected in zip(read_pictures(tmp_path / name), read_pictures(tmp_path / "in"), strict=True):
            assert torch.equal(found.pixels, expected.pixels)
            assert torch.equal(found.labels, expected.labels)


def test_large_pictures_are_cut_when_they_are_loaded(tmp_path):
    write_folder(tmp_path, sizes=[(90, 70), (100, 200)], number=2)
    train, test = (pictures.sized(32) for pictures in read_pictures(tmp_path))
    assert train.pixels is None
    index = torch.tensor([0, 3, 5])
    part, labels = train.get(index, seed=1)
    assert labels.tolist() == [0, 1, 2]
    assert part.shape == (3, 3, 32, 32)
    assert part.dtype == torch.uint8
    assert torch.equal(part, train.get(index, seed=1)[0])
    assert not torch.equal(part, train.get(index, seed=2)[0])
    whole, _ = test.get(torch.tensor([0, 2]), seed=None)
    assert [int(p.float().mean((1, 2)).argmax()) for p in part] == [0, 1, 2]  # a class has its colour
    assert [int(p.float().mean((1, 2)).argmax()) for p in whole] == [0, 2]
    with pytest.raises(ValueError, match="set the size"):
        train.sized(None).get(index, seed=None)


def test_parts_lie_inside(tmp_path):
    for seed in range(300):
        left, top, right, bottom = images._part(100, 60, seed)
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 60
    areas = [(r - x) * (b - t) / 6000 for x, t, r, b in (images._part(100, 60, seed) for seed in range(300))]
    assert min(areas) < 0.15
    assert max(areas) > 0.7


def test_idx_files(tmp_path):
    random = numpy.random.default_rng(0)
    for prefix, number, suffix in (("train", 7, ""), ("t10k", 3, ".gz")):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{suffix}", random.integers(0, 255, (number, 28, 28)))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{suffix}", numpy.arange(number))
    train, test = read_pictures(tmp_path)
    assert train.pixels.shape == (7, 1, 28, 28)
    assert test.labels.tolist() == [0, 1, 2]
    assert len(train.classes) == 7


def write_cifar(folder):
    random = numpy.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        body = {b"data": random.integers(0, 255, (4, 3072)).astype("uint8"), b"labels": [0, 1, 2, 3]}
        (folder / name).write_bytes(pickle.dumps(body, protocol=2))


def test_cifars_batches(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    write_cifar(tmp_path / "cifar-10-batches-py")
    train, test = read_pictures(tmp_path)
    assert train.pixels.shape == (20, 3, 32, 32)
    assert (len(test), len(train.classes)) == (4, 4)


class Harm:
    def __reduce__(self):
        return os.getcwd, ()


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"no data at .*nowhere: put one of these there"):
        read_pictures(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no train and no test images: put one of these there"):
        read_pictures(tmp_path)
    (tmp_path / "a.zip").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.zip is not an archive"):
        read_pictures(tmp_path / "a.zip")
    write_folder(tmp_path / "f", sizes=[(8, 8)], number=2)
    (tmp_path / "f/val/stranger").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "f/val/stranger/0.jpg")
    with pytest.raises(ValueError, match=r"classes without training images: \['stranger'\]"):
        read_pictures(tmp_path / "f")
    (tmp_path / "f/val/stranger/0.jpg").unlink()
    (tmp_path / "f/train/class0/0.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0\.jpg cannot be read as an image"):
        read_pictures(tmp_path / "f")
    cifar = tmp_path / "cifar"
    cifar.mkdir()
    write_cifar(cifar)
    (cifar / "data_batch_3").write_bytes(pickle.dumps({b"data": Harm()}))
    with pytest.raises(ValueError, match=r"data_batch_3 is not a batch .*getcwd"):
        read_pictures(cifar)
    (cifar / "data_batch_3").unlink()
    with pytest.raises(ValueError, match="data_batch_3 is missing"):
        read_pictures(cifar)
    write_idx(tmp_path / "train-images-idx3-ubyte", numpy.zeros((2, 3, 3)))
    with pytest.raises(ValueError, match="has no train-labels-idx1-ubyte nor"):
        read_pictures(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3) + b"12")
    with pytest.raises(ValueError, match="contains 2 bytes: it is truncated"):
        read_pictures(tmp_path)


def test_steps_go_on_where_they_were():
    def first(number, begin=0):
        return [index for index, _ in zip(batch_indices(10, 4, seed=3, first=begin), range(number), strict=False)]

    whole = torch.cat(first(10))
    assert [sorted(part.tolist()) for part in whole.split(10)] == [list(range(10))] * 4
    assert not torch.equal(whole[:10], whole[10:20])
    assert torch.equal(torch.cat(first(7, 3)), whole[12:])
    assert [len(index) for index in first(2)] == [4, 4]
    assert len(next(batch_indices(3, 20, seed=0))) == 20  # a batch larger than the data


def test_micro_batches_are_equal_on_all_ranks():
    index = torch.arange(24)
    found = [micro_batches(index, 5, rank=rank, world_size=2) for rank in (0, 1)]
    assert [[len(part) for part in parts] for parts in found] == [[4, 4, 4], [4, 4, 4]]
    assert torch.equal(torch.cat([part for parts in found for part in parts]), index)
    with pytest.raises(ValueError, match="24 cannot be divided equally by 5 ranks"):
        micro_batches(index, 4, world_size=5)


def pictures(number):
    return Pictures(torch.arange(number), ("a",), torch.arange(number, dtype=torch.uint8).view(-1, 1, 1, 1))


def test_loading_ahead_keeps_the_order_and_ends():
    parts = [torch.tensor([i, 9 - i]) for i in range(5)]
    loaded = list(prefetch(pictures(10), iter(parts), seed=0, device=torch.device("cpu")))
    assert [labels.tolist() for _, labels in loaded] == [[i, 9 - i] for i in range(5)]
    assert [pixels.flatten().tolist() for pixels, _ in loaded] == [[i, 9 - i] for i in range(5)]


def test_an_error_of_the_loader_reaches_the_loop_and_no_thread_stays():
    before = threading.active_count()
    wrong = iter([torch.tensor([0]), torch.tensor([7])])
    loaded = prefetch(pictures(3), wrong, seed=0, device=torch.device("cpu"))
    next(loaded)
    with pytest.raises(IndexError):
        next(loaded)
    endless = prefetch(pictures(3), iter([torch.tensor([0])] * 100), seed=0, device=torch.device("cpu"))
    next(endless)
    endless.close()
    assert threading.active_count() == before


def test_pixels_are_normalised():
    pixels = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    found = normalize_pixels(pixels, torch.float64)
    assert float(found[0, 1, 2, 3]) == pytest.approx((float(pixels[0, 1, 2, 3]) / 255 - 0.456) / 0.224)


@pytest.mark.parametrize(
    ("depth", "number"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_resnets_have_the_published_number_of_parameters(depth, number):
    with torch.device("meta"):
        model = build_resnet(depth)
    assert sum(p.numel() for p in model.parameters()) == number


def test_resnets_for_small_pictures():
    model = build_cifar_resnet(32)
    assert sum(p.numel() for p in model.parameters()) == 464_154
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    small = build_resnet(18, 10, width=8, small_images=True)
    sizes = []
    small[3].register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == [32]
    assert isinstance(small[-1], nn.Linear)
    for call, what in ((lambda: build_cifar_resnet(33), "6n"), (lambda: build_resnet(20), "18, 34, 50")):
        with pytest.raises(ValueError, match=what):
            call()


def test_pictures_come_as_bytes_from_memory():
    buffer = io.BytesIO()
    Image.new("RGB", (100, 80), (9, 200, 30)).save(buffer, "png")
    pictures = Pictures(torch.tensor([0]), ("a",), sources=(images.Member("a.png", buffer.getvalue()),), size=24)
    found, _ = pictures.get(torch.tensor([0]), seed=None)
    assert found[0, :, 5, 5].tolist() == [9, 200, 30]
