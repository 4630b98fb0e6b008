"""The cost of work and transfers in seconds: rough analytic values unless measured.

Input: sizes of factors, layers and transfers. Output: seconds. Owns: nothing; plain frozen data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dkfac.plan.curves import Curve
from dkfac.plan.spec import FactorSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class Costs:
    """Placement depends only on ratios of costs, so rough values do as well as exact ones; names break ties."""

    flop_seconds: float = 1e-11
    """Seconds per floating point operation of dense matrix products."""
    eigen_flops: float = 60.0
    """Operations of an eigendecomposition in units of dim^3; high, because it runs far below the speed of products."""
    inverse_flops: float = 3.0
    latency_seconds: float = 5e-5
    byte_seconds: float = 1e-9
    """Of a link, in one direction."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Measured curves: solvers by a factor's dimension; ``products`` (forward, backward), ``factor`` and
    ``precondition`` by floating point operations; ``average`` and ``pack`` by elements."""

    def work(self, what: str, flops: float) -> float:
        """Return the seconds of one call of any kind of work except a solver."""
        curve = self.curves.get(what)
        return self.flop_seconds * flops if curve is None else curve(flops)

    def decompose(self, factor: FactorSpec, solver: str = "eigen") -> float:
        if factor.form == "diagonal":
            return self.flop_seconds * factor.num_elements
        curve = self.curves.get(solver)
        if curve is not None:
            return factor.num_blocks * curve(factor.dim)
        flops = self.inverse_flops if solver == "cholesky" else self.eigen_flops
        return self.flop_seconds * flops * factor.num_blocks * float(factor.dim) ** 3

    def precondition(self, layer: LayerSpec, solver: str = "eigen") -> float:
        passes = 2 if solver == "cholesky" else 4
        dense = [factor for factor in layer.factors if factor.form == "dense"]
        dims = sum(f.pieces * f.dim**2 / f.whole_dim if f.whole_dim else f.dim for f in dense)
        return self.work("precondition", passes * layer.grad_elements * dims)

    def transfer(self, num_bytes: float) -> float:
        """Return the seconds to send ``num_bytes`` over one rank's link."""
        return self.latency_seconds + self.byte_seconds * num_bytes
