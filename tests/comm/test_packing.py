"""Factors are packed by shape, and buffers hold them in the order of the plan."""

import torch

from dkfac.comm.buffers import vector
from dkfac.comm.packing import Layout, pack, to_buffer, unpack
from dkfac.ops.pack import pack_triangle
from dkfac.plan.spec import FactorSpec
from dkfac.plan.transfer import Part

FACTORS = {
    ("a", "A"): FactorSpec("A", 3),
    ("a", "G"): FactorSpec("G", 4, num_blocks=2),
    ("b", "A"): FactorSpec("A", 5, form="diagonal"),
    ("b", "G"): FactorSpec("G", 3),
    ("c", "A"): FactorSpec("A", 3),
}
CPU = torch.device("cpu")


def sums():
    generator, found = torch.Generator().manual_seed(0), {}
    for name, factor in FACTORS.items():
        value = torch.randn(factor.shape, generator=generator)
        found[name] = value + value.mT if factor.form == "dense" else value
    return found


def layout(held=FACTORS):
    parts = [Part(*name, factor.packed_elements) for name, factor in FACTORS.items()]
    return Layout([*parts, Part("c", "moments", 6)], FACTORS, ["a", "b", "c"], held)


def test_a_buffer_has_what_was_packed_in_the_order_of_its_parts():
    given, flat = sums(), {}
    groups = pack(given, FACTORS, CPU)
    assert [group.names for group in groups] == [[("a", "A"), ("b", "G"), ("c", "A")], [("a", "G")], [("b", "A")]]
    for group in groups:
        flat |= group.parts()
    del flat["b", "G"]
    flat["c", "moments"] = torch.arange(6.0)
    buffer = to_buffer(layout(), flat, 50, torch.float64, CPU)
    values = [pack_triangle(v) if v.ndim == 3 else v for v in given.values()]
    values[3] = torch.zeros(6)
    expected = torch.cat([*(v.reshape(-1) for v in values), torch.arange(6.0), torch.zeros(1)])
    assert torch.equal(buffer, expected.double())


def test_what_is_unpacked_is_what_was_packed_of_the_parts_that_are_held():
    given, flat = sums(), {}
    for group in pack(given, FACTORS, CPU):
        flat |= group.parts()
    buffer = to_buffer(layout(), flat, 50, torch.float32, CPU)
    held = {("a", "A"), ("a", "G"), ("c", "A"), ("c", "moments")}
    groups, others = unpack(layout(held), buffer, FACTORS, lambda name: name[1])
    found = {}
    for group in groups:
        found |= zip(group.names, group.unpacked().chunk(len(group.names)), strict=True)
        for name, means in zip(group.names, group.means(), strict=True):
            torch.testing.assert_close(means, given[name].diagonal(dim1=-2, dim2=-1).mean(-1))
    assert found.keys() == held - {("c", "moments")}
    assert all(torch.equal(found[name], given[name]) for name in found)
    assert torch.equal(others["c", "moments"], torch.zeros(6))


def test_a_vector_of_numbers_and_tensors_of_several_dtypes():
    flag, half = torch.tensor(True), torch.tensor([0.5], dtype=torch.float32)
    assert vector([1, flag, 2.5, half, ~flag], CPU).tolist() == [1, 1, 2.5, 0.5, 0]
    assert vector([1, 2], CPU).dtype == vector([flag], CPU).dtype == torch.float64
