"""``dkfac.roles``: some ranks train, some measure statistics, some decompose (Ba, Grosse and Martens 2017).

Input: the number of ranks per role. Output: the role of this process. Owns: the hub, on the first gradient worker.
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from dkfac import distributed
from dkfac.comm import groups
from dkfac.workers.hub import Hub
from dkfac.workers.secret import FILE_VARIABLE, VARIABLE, given_secret, make_secret, read_secret, remove_secret

Role = Literal["gradient", "statistics", "inverse"]
START_SECONDS = 120.0
"""Seconds that the first gradient worker waits for the helpers to connect."""


@dataclass(slots=True, eq=False)
class RolesPlace:
    """The role of this process, and its number among the processes with the same role."""

    role: Role
    number: int
    counts: dict[str, int]
    group: Any
    """Process group of the gradient workers, for DDP and K-FAC; None on helpers."""
    hub: Hub | None
    """Only on the first gradient worker."""
    store: Any
    name: str
    """Prefix of this assignment's keys in the store; there may be several assignments in one world."""
    secret: bytes | None = field(default=None, repr=False)
    """None: the hub wrote one to a file on this host."""
    device: str = "cpu"
    closed: bool = False

    def serve(self, build: Any, batches: Any, loss: Any) -> bool:
        """Work as a helper until training has ended and return True; on gradient workers return False at once.

        ``build()`` returns the model, ``batches(step)`` returns inputs and targets for the statistics workers, and
        ``loss(output, targets)`` returns the training loss. They must be module-level functions, because a spawned
        child process imports them. If the child dies, training continues with the last decompositions.
        """
        if self.role == "gradient":
            return False
        store = self.store
        address, file = json.loads(store.get(f"{self.name}/hub"))
        from dkfac.workers.child import work

        mine = batches if self.role == "statistics" else None
        secret = read_secret(file) if self.secret is None else self.secret
        arguments = (self.role, self.number, tuple(address), secret, build, mine, loss, self.device)
        child = multiprocessing.get_context("spawn").Process(target=work, args=arguments, name=f"dkfac-{self.role}")
        child.start()
        store.set(f"{self.name}/{self.role}/{self.number}", str(child.pid))
        told = False
        while not store.check([f"{self.name}/done"]):
            if not child.is_alive() and not told:
                told = True
                print(f"dkfac: the {self.role} worker {self.number} (process {child.pid}) has ended with status "
                      f"{child.exitcode}; training goes on with the last decompositions", file=sys.stderr)  # fmt: skip
            time.sleep(0.1)
        child.join(5)
        if child.is_alive():
            child.terminate()
        return True

    def process_of(self, role: Role, number: int = 0) -> int:
        """Return the process id of a helper's child process."""
        return int(self.store.get(f"{self.name}/{role}/{number}"))

    def close(self) -> None:
        """Release the helpers; called when training ends."""
        self.closed = True
        self.group = None  # a group that is still referenced at interpreter exit aborts the process
        if self.hub is not None:
            self.hub.close()
            self.hub = None
            self.store.set(f"{self.name}/done", "1")


def roles(*, gradient: int, statistics: int, inverse: int, secret: str | bytes | None = None) -> RolesPlace:
    """Assign a role to each rank that torchrun started, in the order of the arguments. Every rank must call it.

    ``secret``, the same on all ranks, is what helpers and hub recognise each other by. None: the environment variable
    ``DKFAC_ROLES_SECRET``, or the file that ``DKFAC_ROLES_SECRET_FILE`` names; on one host, a file that only this user
    can read is made if there is neither.
    """
    for name, number in {"gradient": gradient, "statistics": statistics, "inverse": inverse}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"roles({name}={number!r}): each role needs one rank or more")
    known = given_secret(secret)
    place = distributed.init()
    counts = {"gradient": gradient, "statistics": statistics, "inverse": inverse}
    if sum(counts.values()) != place.world_size:
        said = ", ".join(f"{name}={number}" for name, number in counts.items())
        raise ValueError(
            f"roles({said}) are {sum(counts.values())} ranks; torch.distributed has {place.world_size}: start as many "
            f"with torchrun --nproc-per-node"
        )
    if known is None and not _is_one_host():
        raise ValueError(
            f"roles(...) on several hosts need a secret by which helpers and hub recognise each other, the same on all "
            f"ranks: set {VARIABLE} or {FILE_VARIABLE}, or pass roles(secret=...)"
        )
    group, store, name = groups.subgroup(range(gradient)), groups.store(), f"dkfac/workers/{next(_NUMBERS)}"
    hub = None
    if place.rank == 0:
        helpers = {name: number for name, number in counts.items() if name != "gradient"}
        file, shared = make_secret() if known is None else ("", known)
        hub = Hub(helpers, "127.0.0.1" if _is_one_host() else _own_address(), shared)
        store.set(f"{name}/hub", json.dumps([hub.address, file]))
        if known is None:
            atexit.register(remove_secret, file)
    role, number = _role_of(place.rank, counts)
    own = group if role == "gradient" else None
    found = RolesPlace(role, number, counts, own, hub, store, name, known, str(place.device))
    if hub is not None:
        atexit.register(found.close)  # helpers wait for this, however the script ends
    return found


_NUMBERS = itertools.count()


def _own_address() -> str:
    """Return the address by which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        return str(probe.getsockname()[0])


def _role_of(rank: int, counts: dict[str, int]) -> tuple[Role, int]:
    names: tuple[Role, ...] = ("gradient", "statistics", "inverse")
    for name in names:
        if rank < counts[name]:
            return name, rank
        rank -= counts[name]
    raise AssertionError(rank)


def _is_one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
