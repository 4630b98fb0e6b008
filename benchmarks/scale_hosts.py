"""Time what one host does for thousands of ranks: attaching, and the bookkeeping of a step.

    python benchmarks/scale_hosts.py --world 4096 --out benchmarks/results/scale_hosts_cpu.json

One process is the last rank on torch's fake process group, so nothing is sent. The layers are ResNet-152's 156.
To attach, a network of these layers with a 32nd of their channels is built: K-FAC looks at every module, but measures
nothing. The time includes plan, program, comparison with the other ranks, groups and the announcement. For steps the
plan is that of the full widths, tensors are on the meta device and collectives return at once. What remains is what a
host does before a GPU could start: finding transfers, splits and layouts, and making views of buffers.
"""

import argparse
import contextlib
import io
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from environment import write
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dkfac
from dkfac.comm import collectives, groups
from dkfac.comm.transport import Transport
from dkfac.plan.make import Choices, make_plan
from dkfac.plan.models import MODELS
from dkfac.plan.spec import LayerSpec
from dkfac.plan.strategies import STRATEGIES


def specs() -> tuple[LayerSpec, ...]:
    return tuple(shape.spec for shape in MODELS["resnet152"]())


class Narrow(nn.Module):
    """The layers of ResNet-152 with a 32nd of their channels."""

    def __init__(self) -> None:
        super().__init__()
        for spec in specs():
            a, g = spec.factors
            inputs, outputs = max(1, a.dim // a.unit // 32), max(1, g.dim // 32)
            kernel = round(a.unit**0.5)
            layer = (
                nn.Conv2d(inputs, outputs, kernel, bias=False) if spec.kind == "conv" else nn.Linear(inputs, outputs)
            )
            self.add_module(spec.name.replace(".", "_"), layer)


PRIVATE = ("_all_gather", "_reduce_scatter")


class Done:
    def wait(self, *_):
        pass


@contextlib.contextmanager
def nothing_sent():
    """Leave out collectives, so that only the host's work remains."""
    places = (dist, "all_to_all_single"), (dist, "all_reduce"), *((collectives, name) for name in PRIVATE)
    real = [getattr(*place) for place in places]
    for place in places:
        setattr(*place, lambda *_, **__: Done())
    try:
        yield
    finally:
        for place, function in zip(places, real, strict=True):
            setattr(*place, function)


def attach_seconds(strategy: str) -> tuple[float, float]:
    """Return the seconds of attaching K-FAC, and those of the processor, which other processes do not lengthen."""
    model = Narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        kfac = dkfac.KFAC(model, optimizer, strategy=strategy)
    seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    kfac.close()
    return seconds


def host_times(strategy: str, world: int, repeats: int) -> dict:
    """Return milliseconds of one step of each kind: the medians, after a first step that fills the caches."""
    transport = Transport(make_plan(specs(), world, Choices(strategy=strategy)), groups.make_groups(), META)
    transport.open()
    owned = [part for t in transport.program.transfers for part in t.parts if part.owner == transport.rank]
    empty = {part: torch.empty(part.elements, device=META) for part in owned}
    sent = {id(t): torch.empty(t.elements(transport.rank), device=META) for t in transport.program.stage("factors")}

    def ordinary():
        transport.share("gradients", empty.get)

    def refresh():
        transport.share("decompositions", empty.get)

    def measure():
        transport.finish_factors(transport._launch_rest(lambda transfer: sent[id(transfer)]))

    found = {
        "transfers": len(transport.program.transfers),
        "communicators": sum(transport.rank in ranks for ranks in transport.groups._groups),
    }
    with nothing_sent():
        for name, step in (("ordinary", ordinary), ("measure", measure), ("refresh", refresh)):
            step()
            found[f"{name}_ms"] = 1e3 * statistics.median(timed(step) for _ in range(repeats))
    transport.close()
    return found


def timed(step) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


META = torch.device("meta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, _ = [], attach_seconds("auto")  # imports what is imported on first use
    for world in given.world:
        dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
        for strategy in ("auto", *STRATEGIES):
            wall, cpu = attach_seconds(strategy)
            row = {"world": world, "strategy": strategy, "attach_seconds": wall, "attach_cpu_seconds": cpu}
            row |= host_times(strategy, world, given.repeats)
            print({name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
            rows.append(row)
        dist.destroy_process_group()
    if given.out:
        write(given.out, {"layers": len(specs()), "rows": rows})


if __name__ == "__main__":
    main()
