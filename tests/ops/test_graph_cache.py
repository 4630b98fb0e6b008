"""What graphs are given to work on; the graphs themselves are tested on a GPU."""

import pytest
import torch

from dkfac.ops import graph_cache
from dkfac.ops.graph_cache import StagedFunctions, StagingBuffer


def rows(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype)


FORMS = [
    rows(8, 6, 5)[:, 1::3],
    rows(8, 3, 4, 4).to(memory_format=torch.channels_last)[2:4],
    rows(7, 5, dtype=torch.bfloat16),
    rows(3, 4).mT,
    rows(5, 1).as_strided((1, 5), (1, 1)),
]


def test_copies_made_in_the_same_order_lie_in_the_same_place_and_do_not_overlap():
    arena, places = StagingBuffer(), []
    for _ in range(4):
        copies = arena.keep(*([t] for t in FORMS))
        for copy, tensor in zip(copies, FORMS, strict=True):
            assert torch.equal(copy, tensor)
            assert copy.stride() == torch.empty_like(tensor).stride()
        places.append([copy.data_ptr() for copy in copies])
        arena.clear()
    assert places[1] == places[2] == places[3], "there is room from the second time on"
    assert places[0] != places[1]


def test_what_was_given_up_is_used_again():
    arena = StagingBuffer()
    arena.keep([rows(100, 100)])
    arena.clear()
    (kept,) = arena.keep([FORMS[3]])
    before = arena.used
    (first,) = arena.keep([FORMS[2]])
    arena.used = before
    (second,) = arena.keep([FORMS[2]])
    assert first.data_ptr() == second.data_ptr() != kept.data_ptr()
    assert torch.equal(kept, FORMS[3])


def test_copies_without_room_are_as_good():
    arena = StagingBuffer()
    (small,) = arena.keep([FORMS[3]])
    arena.clear()
    large = arena.keep([FORMS[3]], [rows(100, 100)])
    assert torch.equal(large[0], FORMS[3])
    assert torch.equal(large[1], rows(100, 100))
    assert small.data_ptr() != large[0].data_ptr()


def test_a_staged_function_sees_what_it_was_given_and_its_results_stay(monkeypatch):
    """Graphs are acted: a replay runs what was captured again, on the memory that it was captured with."""
    captured = []

    class Acted:
        def __init__(self, function):
            self.function, self.found = function, function()

        def replay(self):
            for old, new in zip(self.found, self.function(), strict=True):
                old.copy_(new)

    def capture(self, function, device):
        captured.append(Acted(function))
        return captured[-1], captured[-1].found

    monkeypatch.setattr(graph_cache.GraphPool, "capture", capture)
    staged, sizes, kept = StagedFunctions(), [(3, 4), (30, 4), (5, 6), (300, 7)], []
    for i in range(12):
        for n, size in enumerate(sizes[: 2 + i // 4]):  # larger ones come later: what there is room for moves
            x, y = (torch.randn(size, generator=torch.Generator().manual_seed(10 * i + n + k)) for k in (0, 5))
            kept.append((x, y, staged.run(n, lambda a, b: (a.mT @ b, a + b), [1.0, 2.0], [x], [y])))
    assert len(captured) >= len(sizes)
    for x, y, (product, total) in kept:
        assert torch.equal(product, x.mT @ y)
        assert torch.equal(total, 2 * (x + y))


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_the_copies_of_a_group_are_one_tensor(form):
    arena, group = StagingBuffer(), [FORMS[form] * n for n in (1, 2, 3)]
    for _ in range(3):
        other, whole = arena.keep([rows(5)], group)
        assert torch.equal(whole, torch.cat(group))
        assert torch.equal(other, rows(5))
        assert whole.is_contiguous() or whole.is_contiguous(memory_format=torch.channels_last)
        arena.clear()
