"""Step time on several hosts with a slow network: SGD and each strategy.

Each host is a network namespace with one rank; all are connected to one bridge, and every link is limited to ``--rate``
in both directions. All configurations run in the same processes and alternate in blocks of steps, so that noise of the
machine affects all of them. A configuration is a strategy with optional settings:
``comm-opt:wire_dtype=float16,solver=eigen``. Needs root, ``ip`` and ``tc``; without them it prints so and skips.
"""

import argparse
import ast
import contextlib
import hashlib
import itertools
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from environment import write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dkfac

BATCH = 32
LINK = "eth0"
IN_HOST = "DKFAC_NETWORK_HOST"
ADDRESS = "10.77.0.{}"
SENT = pathlib.Path(f"/sys/class/net/{LINK}/statistics/tx_bytes")


class Unable(Exception):
    """This machine cannot make the network."""


def call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Unable(f"`{command}` failed: {done.stderr.strip()}")


@contextlib.contextmanager
def network(hosts: int, rate: str, burst: str):
    """Yield the names of the hosts' namespaces; the bridge has one of its own, so nothing is left outside them."""
    if os.geteuid() != 0:
        raise Unable("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise Unable(f"{' and '.join(missing)} not found: `apt-get install iproute2` is needed")
    bridge, *names = [f"dkfac{os.getpid()}-{end}" for end in ("bridge", *range(hosts))]
    shape = f"root tbf rate {rate} burst {burst} latency 50ms"
    try:
        call(f"ip netns add {bridge}")
        call(f"ip -n {bridge} link add bridge up type bridge")
        for rank, name in enumerate(names):
            call(f"ip netns add {name}")
            call(f"ip -n {name} link add {LINK} type veth peer name port{rank} netns {bridge}")
            call(f"ip -n {bridge} link set port{rank} master bridge up")
            call(f"ip -n {name} addr add {ADDRESS.format(rank + 1)}/24 dev {LINK}")
            for link in ("lo", LINK):
                call(f"ip -n {name} link set {link} up")
            # A queue shapes what leaves: the host's end limits what it sends, the bridge's end what it receives.
            call(f"tc -n {name} qdisc add dev {LINK} {shape}")
            call(f"tc -n {bridge} qdisc add dev port{rank} {shape}")
        yield names
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def launch(names: list[str], script: str = __file__) -> None:
    """Run a file once in every host and wait; the first failure ends all."""
    shared = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29500", "WORLD_SIZE": str(len(names))}
    shared |= {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.path.abspath(script), *sys.argv[1:]]
    children = []
    try:
        for rank, name in enumerate(names):
            env = os.environ | shared | {"RANK": str(rank), IN_HOST: name}
            children.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=env))
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                break
            time.sleep(0.2)
    finally:
        for child in children:
            child.kill()
        codes = [child.wait() for child in children]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        widths = [784, 1000, 1000, 500]
        hidden = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(500, 10))
    widths = [1, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    hidden = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        hidden += [nn.Conv2d(a, b, 3, stride=2 if i in (3, 6) else 1, padding=1), nn.ReLU()]
    return nn.Sequential(*hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def settings_of(texts: list[str]) -> dict:
    settings = dict(text.split("=", 1) for text in texts)
    for key, text in settings.items():
        with contextlib.suppress(ValueError, SyntaxError):
            settings[key] = ast.literal_eval(text)
    return settings


class Runner:
    """One configuration: model, optimizer and K-FAC, and what its blocks took."""

    def __init__(self, config: str, model: str, args: argparse.Namespace) -> None:
        name, _, own = config.partition(":")
        self.model = DistributedDataParallel(build(model))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.kfac = self.peer = None
        self.seconds, self.sent = [], []
        own = settings_of(re.split(r",(?=\w+=)", own)) if own else {}
        if name.startswith("peer-"):
            from kfac.preconditioner import DistributedStrategy, KFACPreconditioner

            common = {"factor_update_steps": args.factor_interval, "inv_update_steps": args.inverse_interval}
            common["grad_worker_fraction"] = DistributedStrategy[name[len("peer-") :].replace("-", "_").upper()]
            self.peer = KFACPreconditioner(self.model, lr=0.01, **common | own)
        elif name != "sgd":
            common = {"factor_interval": args.factor_interval, "inverse_interval": args.inverse_interval}
            common |= {"solver": args.solver, "strategy": name, "warmup_refresh": None}
            common |= settings_of([f"wire_dtype={args.wire_dtype}", *args.set])
            self.kfac = dkfac.KFAC(self.model, self.optimizer, announce=False, **common | own)

    def block(self, batches: list, steps: int) -> None:
        dist.barrier()
        sent, begin = int(SENT.read_text()), time.perf_counter()
        for _, (images, labels) in zip(range(steps), itertools.cycle(batches), strict=False):
            self.optimizer.zero_grad()
            self.loss = F.cross_entropy(self.model(images), labels)
            self.loss.backward()
            if self.peer:
                self.peer.step()
            self.optimizer.step()
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.sent.append((int(SENT.read_text()) - sent) / steps)


def timed(function, *inputs) -> float:
    """Return the median over ten calls of the slowest rank's seconds."""
    function(*inputs)
    seconds = []
    for _ in range(10):
        dist.barrier()
        begin = time.perf_counter()
        function(*inputs)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(map(max, zip(*gathered(seconds), strict=True)))


def gathered(value) -> list:
    """Return every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def parts_of_sgd(model: nn.Module, batch: tuple) -> dict:
    """Time what an SGD step waits for, each part alone."""
    gradient = torch.ones(sum(p.numel() for p in model.parameters()))

    def compute():
        with model.no_sync():
            F.cross_entropy(model(batch[0]), batch[1]).backward()

    parts = {"allreduce_gradient_seconds": timed(dist.all_reduce, gradient), "compute_seconds": timed(compute)}
    return {"gradient_bytes": gradient.nbytes, **parts}


def measure(model: str, args: argparse.Namespace) -> dict:
    """Run all configurations in turns; every rank returns the same figures."""
    torch.manual_seed(1000 + dist.get_rank())
    batches = [(torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))) for _ in range(8)]
    runners = {config: Runner(config, model, args) for config in ["sgd", *args.strategies]}
    block = args.inverse_interval * math.ceil(10 / args.inverse_interval)
    for runner in runners.values():
        runner.block(batches, block)
        runner.seconds, runner.sent = [], []
    before = {config: runner.kfac.report()["stage_seconds"] for config, runner in runners.items() if runner.kfac}
    rounds, order = math.ceil(args.steps / block), list(runners.values())
    for _ in range(rounds):
        for runner in order:
            runner.block(batches, block)
        order.append(order.pop(0))
    results = {}
    for config, runner in runners.items():
        blocks = [max(ranks) for ranks in zip(*gathered(runner.seconds), strict=True)]
        sent = gathered(statistics.mean(runner.sent))
        entry = results[config] = {"step_seconds": spread(blocks), "blocks": blocks, "last_loss": runner.loss.item()}
        entry["bytes_sent_per_step"] = {"mean": statistics.mean(sent), "most": max(sent)}
        base = results["sgd"]
        entry["ratio_to_sgd"] = entry["step_seconds"]["median"] / base["step_seconds"]["median"]
        entry["ratio_by_round"] = spread([a / b for a, b in zip(blocks, base["blocks"], strict=True)])
        if runner.kfac:
            after = runner.kfac.report()["stage_seconds"]
            ranks = gathered({k: (v - before[config].get(k, 0.0)) / (rounds * block) for k, v in after.items()})
            for key, what in (("stage_seconds", statistics.mean), ("stage_seconds_slowest", max)):
                entry[key] = {k: what([rank.get(k, 0.0) for rank in ranks]) for k in sorted(set().union(*ranks))}
            if args.keep_weights_check:
                entry["weights"] = compare(runner, next(r for r in runners.values() if r.kfac))
    return {
        "block_steps": block,
        "rounds": rounds,
        **parts_of_sgd(runners["sgd"].model, batches[0]),
        "configurations": results,
    }


def compare(runner: Runner, first: Runner) -> dict:
    """Say whether all ranks hold the same weights, and how far they are from those of the first K-FAC."""
    ours, theirs = (nn.utils.parameters_to_vector(r.model.parameters()).detach() for r in (runner, first))
    hashes = gathered(hashlib.sha256(ours.numpy().tobytes()).hexdigest())
    return {"ranks_equal": len(set(hashes)) == 1, "difference": ((ours - theirs).norm() / theirs.norm()).item()}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def run_rank(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    models = {name: measure(name, args) for name in (["mlp", "cnn"] if args.model == "both" else [args.model])}
    if dist.get_rank() == 0:
        show(models)
        settings = {key: value for key, value in vars(args).items() if key not in ("out", "peer")}
        control = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        write(args.out, {**settings, "batch_per_rank": BATCH, "tcp_congestion_control": control, "models": models})
    dist.barrier()
    dist.destroy_process_group()


def show(models: dict) -> None:
    def milliseconds(seconds: dict[str, float]) -> str:
        return ", ".join(f"{name.removesuffix('_seconds')} {value * 1e3:.1f} ms" for name, value in seconds.items())

    for model, entry in models.items():
        print(f"{model}: alone {milliseconds({k: v for k, v in entry.items() if k.endswith('_seconds')})}")
        for config, row in entry["configurations"].items():
            print(f"  {config}: {milliseconds(row['step_seconds'])}; {row['ratio_to_sgd']:.2f} x SGD;", end=" ")
            print(f"{row['bytes_sent_per_step']['mean'] / 1e6:.2f} MB sent; last loss {row['last_loss']:.3g}")
            if "stage_seconds" in row:
                print("    by stage:", milliseconds(row["stage_seconds"]), row.get("weights", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--rate", default="1gbit", help="of every link, each way, as tc writes it")
    add("--burst", default="256kb", help="of a link; below 128kb packets are split and far less than the rate passes")
    add("--model", choices=["mlp", "cnn", "both"], default="both")
    add("--steps", type=int, default=100, help="measured steps of each configuration, rounded up to whole blocks")
    add("--strategies", nargs="*", default=["comm-opt", "sharded", "local"])
    add("--factor-interval", type=int, default=1)
    add("--inverse-interval", type=int, default=10)
    add("--solver", default="cholesky")
    add("--wire-dtype", default="bfloat16")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting of K-FAC")
    add("--peer", help="folder of kfac-pytorch: allows peer-comm-opt and peer-mem-opt among the strategies")
    add("--keep-weights-check", action="store_true", help="compare weights between ranks and with the first K-FAC")
    add("--out", default="benchmarks/results/network.json")
    args = parser.parse_args()
    if args.peer:
        sys.path.insert(0, args.peer)
    if IN_HOST in os.environ:
        run_rank(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with network(args.hosts, args.rate, args.burst) as names:
            launch(names)
    except Unable as reason:
        print(f"skip: {reason}")


if __name__ == "__main__":
    main()
