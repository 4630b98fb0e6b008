"""R33: who talks to the hub of ``roles`` without the secret gets nowhere, whatever it sends."""

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import time
from multiprocessing.connection import Client

import pytest
import torch
from helpers_ranks import on_processes

import dkfac
from dkfac.comm import groups, messages
from dkfac.config.settings import Settings
from dkfac.workers import channel as channels
from dkfac.workers import secret
from dkfac.workers.channel import AuthenticationError
from dkfac.workers.hub import STRANGERS, Hub, connect_to_hub

SECRET = b"a secret of 32 bytes for a test."
LIMIT = 1 << 20
OPEN = []


@pytest.fixture
def hub():
    found = Hub({"inverse": 1}, "127.0.0.1", SECRET)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def closed():
    """Close what a test opened."""
    yield
    while OPEN:
        OPEN.pop().close()


def dial(address):
    OPEN.append(socket.create_connection(address, timeout=20))
    return OPEN[-1]


def join_hub(address, **options):
    OPEN.append(connect_to_hub(address, SECRET, "inverse", 0, **options))
    return OPEN[-1]


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def bombs(file):
    """What a stranger might send: pickles, in every framing that there has ever been."""
    data = pickle.dumps(Bomb(file))
    yield data
    yield struct.pack("!i", len(data)) + data
    yield struct.pack("!Q32s", len(data), b"\0" * 32) + data
    yield b"dkfac-roles-1\0\0\0" + struct.pack("!BI", 1, 0) + data.ljust(64, b"\0")[:64] + data


def attack(rank, folder):
    """Rank 1 plays a process of the network: it knows all that lies in the store, and nothing else."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with pytest.raises(ValueError, match="on several hosts need a secret"):
        dkfac.roles(gradient=1, statistics=1, inverse=1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    file = f"{folder}/opened"
    place = dkfac.roles(gradient=1, statistics=1, inverse=1)
    store = groups.store()
    if rank == 1:
        said = json.loads(store.get("dkfac/workers/0/hub"))
        address = tuple(said[0])
        words = [str(item) for item in said[1:]]
        keys = [word.encode() for word in words] + [bytes.fromhex(word) for word in words]
        for key in keys:
            with contextlib.suppress(Exception), Client(address, authkey=key) as connection:
                connection.send_bytes(pickle.dumps(("inverse", 0)))
                connection.send_bytes(pickle.dumps(Bomb(file)))
                time.sleep(0.5)
            for number in (0, 1):
                with contextlib.suppress(Exception):
                    connect_to_hub(address, key, "inverse", number, 1)
        for data in bombs(file):
            with contextlib.suppress(OSError), socket.create_connection(address) as raw:
                raw.sendall(data)
                time.sleep(0.3)
        store.set("attacked", "1")
    store.get("attacked")
    admitted = [] if place.hub is None else list(place.hub.outboxes)
    place.close()
    return os.path.exists(file), admitted


def test_a_process_that_knows_only_the_store_runs_nothing_in_rank_0(tmp_path):
    found = on_processes(3, attack, str(tmp_path))
    assert found == [(False, [])] * 3


def test_nothing_of_the_secret_lies_in_the_store_and_only_this_user_can_read_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    name, made = secret.make_secret()
    assert secret.read_secret(name) == made
    assert made.hex() not in name
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    for bad in ("../x", name + "/", "", name.upper() + "G"):
        with pytest.raises(ValueError, match="is not the name of a secret"):
            secret.read_secret(bad)
    secret.remove_secret(name)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    with pytest.raises(RuntimeError, match="only this user can enter: remove it, or set DKFAC_ROLES_SECRET"):
        secret.make_secret()


def test_a_secret_comes_from_the_option_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("DKFAC_ROLES_SECRET", raising=False)
    assert secret.given_secret(None) is None
    file = tmp_path / "secret"
    file.write_text("from the file, long enough\n")
    monkeypatch.setenv("DKFAC_ROLES_SECRET_FILE", str(file))
    assert secret.given_secret(None) == b"from the file, long enough"
    monkeypatch.setenv("DKFAC_ROLES_SECRET", "from the environment")
    assert secret.given_secret(None) == b"from the environment"
    assert secret.given_secret("from the argument") == b"from the argument"
    with pytest.raises(ValueError, match=r"roles\(secret=...\) has 5 bytes, at least 16 are needed"):
        secret.given_secret("short")
    monkeypatch.delenv("DKFAC_ROLES_SECRET")
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        secret.given_secret(None)


def test_strangers_at_the_hubs_door_keep_nobody_out(hub):
    with socket.create_connection(hub.address):
        pass  # gone at once
    for _ in range(STRANGERS + 10):
        dial(hub.address)  # and says nothing
    with pytest.raises(AuthenticationError, match="do all ranks have the same secret"):
        connect_to_hub(hub.address, b"not the secret, but as long", "inverse", 0, 1)
    worker = join_hub(hub.address)
    hub.wait_for_all(10)
    assert not hub.lost
    double = join_hub(hub.address)  # there is one already: this connection ends
    with pytest.raises((EOFError, OSError)):
        double.receive(lambda: LIMIT)
    assert hub.all_of("inverse") == [("inverse", 0)]
    hub.close()
    with pytest.raises((EOFError, OSError)):
        worker.receive(lambda: LIMIT)


def test_a_flood_of_strangers_is_bounded(hub):
    """The oldest connections are ended: neither sockets nor threads grow with their number."""
    flood = [dial(hub.address) for _ in range(3 * STRANGERS)]
    deadline = time.monotonic() + 20
    while len(hub.strangers) != STRANGERS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(hub.strangers) == STRANGERS
    ended = 0
    for connection in flood[:STRANGERS]:
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            while connection.recv(1000):
                pass
        ended += 1
    assert ended == STRANGERS
    join_hub(hub.address)


def test_a_silent_connection_is_ended(hub, monkeypatch):
    monkeypatch.setattr(channels, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(channels, "POLL_SECONDS", 0.05)
    with socket.create_connection(hub.address, timeout=20) as silent:
        silent.sendall(b"d")  # and no more
        received = b""
        while part := silent.recv(1000):
            received += part
        assert len(received) == 16 + 32  # who it talks to and a random number, then the end
    deadline = time.monotonic() + 20
    while hub.strangers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hub.strangers == []


def test_a_hub_without_the_secret_is_refused_by_the_worker():
    other = Hub({"inverse": 1}, "127.0.0.1", b"another secret, of a stranger")
    with pytest.raises(AuthenticationError, match="do all ranks have the same secret"):
        connect_to_hub(other.address, SECRET, "inverse", 0, 1)
    other.close()
    with socket.create_server(("127.0.0.1", 0)) as server:  # one that echoes what it gets
        server.settimeout(20)

        def answer():
            connection = server.accept()[0]
            OPEN.append(connection)
            connection.sendall(b"dkfac-roles-1\0\0\0" + b"n" * 32)
            connection.sendall(connection.recv(1000)[-32:])

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(AuthenticationError, match="the hub does not know the secret"):
            connect_to_hub(server.getsockname(), SECRET, "inverse", 0, 1)


def test_the_hub_listens_at_one_address_only(hub):
    assert hub.address[0] == "127.0.0.1"


# --- someone between the two ends


class Between:
    """Passes bytes on between a worker and the hub, and keeps what the worker sent."""

    def __init__(self, address, change=lambda data, number: data):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address, self.target, self.change, self.kept = self.server.getsockname(), address, change, []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        near, far = self.server.accept()[0], dial(self.target)
        self.far = far
        far.settimeout(None)
        OPEN.extend((near, self.server))
        threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()
        self._pass(near, far, True)

    def _pass(self, source, sink, keep):
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    self.kept.append(data)
                    data = self.change(data, number)
                    number += 1
                sink.sendall(data)


def wait_until_lost(hub):
    deadline = time.monotonic() + 20
    while not hub.lost and time.monotonic() < deadline:
        time.sleep(0.02)
    return hub.lost.get(("inverse", 0))


def test_a_changed_message_ends_the_connection(hub):
    def change(data, number):
        return data if number == 0 else data[:-1] + bytes([data[-1] ^ 1])

    between = Between(hub.address, change)
    worker = join_hub(between.address)
    worker.send(("done", 1, torch.ones(4)))
    assert wait_until_lost(hub) == "a message is not authentic"
    assert hub.answers("inverse", 1) == []


def test_a_repeated_message_ends_the_connection(hub):
    between = Between(hub.address)
    worker = join_hub(between.address)
    worker.send(("done", 1, "once"))
    assert hub.answers("inverse", 1) == ["once"]
    between.far.sendall(b"".join(between.kept[1:]))
    assert wait_until_lost(hub) == "a message is not authentic"
    assert hub.answers("inverse", 1) == []


def test_what_was_said_on_another_connection_lets_nobody_in(hub):
    between = Between(hub.address)
    worker = join_hub(between.address)
    worker.send(("done", 1, "answer"))
    assert hub.answers("inverse", 1) == ["answer"]
    other = Hub({"inverse": 1}, "127.0.0.1", SECRET)
    replay = dial(other.address)
    for data in between.kept:
        replay.sendall(data)
    with contextlib.suppress(OSError):
        while replay.recv(1000):
            pass
    assert other.outboxes == {}
    assert other.num_refused == 1
    other.close()


def test_a_message_longer_than_any_there_can_be_is_refused_before_it_is_read(hub):
    hub.expect(1000)
    worker = join_hub(hub.address)
    with contextlib.suppress(OSError):  # it may have been closed before the last byte
        worker.send(("done", 1, torch.zeros(1000)))
    assert "at most 1000 are possible" in wait_until_lost(hub)


# --- the format


joined = messages.to_tensor


def test_messages_come_back_as_they_were():
    tensors = [torch.randn(3, 4, dtype=torch.float64), torch.zeros(0, 2), torch.tensor(3), torch.arange(5) > 2]
    tensors += [torch.randn(6).bfloat16()[::2], torch.randn(3, 3).half().mT]
    value = {"a": [1, 2.5, None, True, "text", {"t": 0, "d": {}}], "tensors": tensors, "": float("inf")}
    found = messages.decode(joined(value))
    assert found["a"] == value["a"]
    assert found[""] == value[""]
    for one, two in zip(found["tensors"], tensors, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


def test_what_has_no_place_in_a_message_is_refused_with_its_place():
    with pytest.raises(TypeError, match="/weights/extra is a Bomb: only tensors, numbers"):
        messages.encode({"weights": {"extra": Bomb("x")}})
    with pytest.raises(TypeError, match="complex64"):
        messages.encode([torch.zeros(1, dtype=torch.complex64)])


def head(text, rest=b""):
    text = text.encode() if isinstance(text, str) else text
    return plain(struct.pack("!Q", len(text)) + text + rest)


def plain(data):
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "data",
    [
        plain(b""),
        plain(b"1234567"),
        plain(struct.pack("!Q", 2**63)),
        head(pickle.dumps(1)),
        head("[]"),
        head('{"tree": {"t": 0}, "tensors": []}'),
        head('{"tree": {"t": -1}, "tensors": [["float32", [1]]]}', bytes(16)),
        head('{"tree": 1, "tensors": [["float32", [1000000000000]]]}', bytes(16)),
        head('{"tree": 1, "tensors": [["float32", [-1]]]}', bytes(16)),
        head('{"tree": 1, "tensors": [["float32", [true]]]}', bytes(16)),
        head('{"tree": 1, "tensors": [["os", [1]]]}', bytes(16)),
        head('{"tree": 1, "tensors": [["float32", ' + "[" * 20000 + "]" * 20000 + "]]}"),
        head('{"tree": 1, "tensors": []}', bytes(16)),
        head('{"tree": {"x": 1}, "tensors": []}'),
        head('{"tree": ' + "[" * 100000 + "]" * 100000 + ', "tensors": []}'),
    ],
    ids=lambda data: str(bytes(data[8:48].tolist())),
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match="not a message of dkfac"):
        messages.decode(data)


def test_damaged_messages_are_refused_or_read_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    whole = joined({"a": torch.randn(5), "b": [1, "x"]})
    for _ in range(500):
        data = whole.clone()
        place = int(torch.randint(len(data), (), generator=generator))
        data[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        with contextlib.suppress(ValueError):
            messages.decode(data[: int(torch.randint(1, len(data) + 1, (), generator=generator))])
        with contextlib.suppress(ValueError):
            messages.decode(data)


def test_settings_come_back_as_they_were():
    options = {"skip": ["a", "b*"], "warmup_refresh": (2, 10), "inverse_interval": 20, "factor_interval": 10}
    settings = Settings(**options, curvature="kfac", experimental={"basis_dtype": "float32", "max_interval": 200})
    assert Settings(**messages.decode(joined(settings.describe()))) == settings
