"""What graphs are given to work on; the graphs themselves are tested on a GPU."""

import torch

from dkfac.replay import Arena


def rows(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype)


FORMS = [
    rows(8, 6, 5)[:, 1::3],
    rows(8, 3, 4, 4).to(memory_format=torch.channels_last)[2:4],
    rows(7, 5, dtype=torch.bfloat16),
    rows(3, 4).mT,
]


def test_copies_made_in_the_same_order_lie_in_the_same_place_and_do_not_overlap():
    arena, places = Arena(), []
    for _ in range(4):
        copies = [arena.keep(t) for t in FORMS]
        for copy, tensor in zip(copies, FORMS, strict=True):
            assert torch.equal(copy, tensor)
            assert copy.stride() == torch.empty_like(tensor).stride()
        places.append([copy.data_ptr() for copy in copies])
        arena.clear()
    assert places[1] == places[2] == places[3], "there is room from the second time on"
    assert places[0] != places[1]


def test_what_was_given_up_is_used_again():
    arena = Arena()
    arena.keep(rows(100, 100))
    arena.clear()
    kept = arena.keep(FORMS[3])
    before = arena.used
    first = arena.keep(FORMS[2])
    arena.used = before
    second = arena.keep(FORMS[2])
    assert first.data_ptr() == second.data_ptr() != kept.data_ptr()
    assert torch.equal(kept, FORMS[3])


def test_copies_without_room_are_as_good():
    arena = Arena()
    small = arena.keep(FORMS[3])
    arena.clear()
    large = [arena.keep(t) for t in (FORMS[3], rows(100, 100))]
    assert torch.equal(large[0], FORMS[3])
    assert torch.equal(large[1], rows(100, 100))
    assert small.data_ptr() != large[0].data_ptr()
