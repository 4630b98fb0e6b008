"""Curves and lines from measured points."""

import math

import pytest

from dkfac.plan.curves import Curve
from dkfac.tools.measure.fit import fit_curve, fit_line

SIZES = [32, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    "curve",
    [
        Curve("polynomial", (1e-4, 0.0, 2e-9, 5e-12)),
        Curve("power", (1e-3, 1e-9, 2.4)),
        Curve("exponential", (3e-3, 1e-3)),
    ],
    ids=lambda curve: curve.form,
)
def test_what_made_the_points_is_found_again(curve):
    found = fit_curve([(size, curve(size)) for size in SIZES])
    for size in (48, 300, 1500, 4096 if curve.form != "exponential" else 1800):
        assert found(size) == pytest.approx(curve(size), rel=0.05)
    assert found.error < 0.02


def test_noise_is_told_as_the_error_of_what_was_left_out():
    noise = [1.1, 0.9, 1.05, 0.95, 1.1, 0.92, 1.0]
    exact = Curve("polynomial", (1e-3, 0.0, 0.0, 1e-11))
    found = fit_curve([(size, n * exact(size)) for size, n in zip(SIZES, noise, strict=True)])
    assert 0.03 < found.error < 0.4
    assert found(700) == pytest.approx(exact(700), rel=0.25)


def test_coefficients_are_never_negative_so_that_nothing_gets_cheaper_with_size():
    found = fit_curve([(1, 5.0), (2, 4.0), (3, 3.5), (4, 3.4)])
    values = [found(x) for x in range(1, 20)]
    assert values == sorted(values)
    assert min(values) > 0


def test_a_line_has_a_latency_and_a_bandwidth():
    line = fit_line([(n, 2e-4 + 3e-9 * n) for n in (1e3, 1e5, 1e7)])
    assert (line.latency, line.byte_seconds) == pytest.approx((2e-4, 3e-9))
    assert line.error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("points", [[], [(1, 1.0)], [(1, 1.0), (2, 0.0)], [(-1, 1.0), (2, 1.0)]])
def test_points_that_mean_nothing_are_refused(points):
    with pytest.raises(ValueError, match="two or more sizes"):
        fit_curve(points)


def test_a_curve_of_no_known_form_is_refused():
    with pytest.raises(ValueError, match="'polynomial', 'power' or 'exponential'"):
        Curve("spline", (1.0,))(3)
    assert math.isfinite(Curve("power", (0.0, 1.0, 0.5))(4.0))


def test_a_curve_goes_through_what_was_measured_and_on_by_its_form():
    points = [(10.0, 1.0), (100.0, 1.5), (1000.0, 9.0), (10000.0, 60.0)]
    found = fit_curve(points, degree=1)
    for size, seconds in points:
        assert found(size) == pytest.approx(seconds)
    assert 1.5 < found(300.0) < 9.0
    assert found(20000.0) == pytest.approx(60.0 * found.form_at(20000.0) / found.form_at(10000.0))


def test_what_is_counted_in_operations_grows_no_faster_than_they_do():
    """Launches and caches bend measured points; a fitted cube or exponential would be absurd far from them."""
    points = [(1e6, 1e-4), (1e8, 1.1e-4), (1e9, 2e-4), (3e9, 1.2e-3), (1e10, 9e-3)]
    found = fit_curve(points, degree=1)
    assert found.form in ("polynomial", "power")
    assert found(1e13) <= 1001 * found(1e10)
