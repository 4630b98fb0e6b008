"""The secret that the hub and the helpers share. It never lies in torch.distributed's store, which anyone can read.

Input: an argument, environment variables, or a file in a folder that only this user can enter. Output: the secret.
Owns: that file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

VARIABLE, FILE_VARIABLE = "DKFAC_ROLES_SECRET", "DKFAC_ROLES_SECRET_FILE"
LEAST_BYTES = 16
_NAME = re.compile(r"[0-9a-f]{32}")


def given_secret(secret: str | bytes | None) -> bytes | None:
    """Return the secret of the argument, of the variable, or of its file; None if there is none."""
    where, found = "roles(secret=...)", secret
    if found is None and VARIABLE in os.environ:
        where, found = VARIABLE, os.environ[VARIABLE]
    if found is None and FILE_VARIABLE in os.environ:
        where = f"{FILE_VARIABLE}={os.environ[FILE_VARIABLE]}"
        try:
            found = Path(os.environ[FILE_VARIABLE]).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"{where} cannot be read ({error}): every rank needs the same file") from None
    if found is None:
        return None
    if not isinstance(found, str | bytes):
        raise ValueError(f"{where} is a {type(found).__name__}: it must be a string or bytes")
    found = found.encode() if isinstance(found, str) else found
    if len(found) < LEAST_BYTES:
        raise ValueError(
            f"{where} has {len(found)} bytes, at least {LEAST_BYTES} are needed: make one with "
            f"`python -c 'import secrets; print(secrets.token_hex(32))'`"
        )
    return found


def make_secret() -> tuple[str, bytes]:
    """Write a new secret to this user's private folder; return the file's name, which is no secret, and the secret."""
    name, secret = secrets.token_hex(16), secrets.token_bytes(32)
    number = os.open(_private_folder() / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(secret)
    return name, secret


def read_secret(name: str) -> bytes:
    """Return the secret that another process of this user wrote on this host."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a secret of dkfac.roles")
    secret = (_private_folder() / name).read_bytes()
    if len(secret) < LEAST_BYTES:
        raise ValueError(f"the secret {name} of dkfac.roles is incomplete")
    return secret


def remove_secret(name: str) -> None:
    with contextlib.suppress(OSError):
        (_private_folder() / name).unlink()


def _private_folder() -> Path:
    """Return a folder that belongs to this user and that nobody else can enter."""
    folder = Path(tempfile.gettempdir()) / f"dkfac-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise RuntimeError(
            f"{folder} is not a folder that only this user can enter: remove it, or set {VARIABLE} to the same secret "
            f"on all ranks"
        )
    return folder
