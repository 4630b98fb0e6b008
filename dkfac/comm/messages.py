"""Values as bytes that another process reads: JSON and raw tensors, so that reading one runs no code.

Input: nested dicts, lists, numbers, strings and tensors; or bytes. Output: the other of the two. Owns: nothing.

Layout: the length of the head (8 bytes, big endian); the head, JSON with the dtypes and shapes of the tensors and
references to them by position; the tensors, each padded to 16 bytes. Every length is checked against the bytes there
are before anything is made of them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.plan.spec import LayerSpec

_LENGTH = struct.Struct("!Q")
_ALIGNMENT = 16
_MOST_DIMS = 16
_PLAIN = (str, int, float, bool, type(None))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_SLACK = 1 << 20


def largest_message(model: nn.Module, specs: Iterable[LayerSpec]) -> int:
    """Return a bound on the bytes of a message about a model: its state, or factors and decompositions of layers."""
    state = sum(t.nbytes for t in model.state_dict().values() if isinstance(t, Tensor))
    factors = [factor for spec in specs for factor in spec.factors]
    elements = sum(f.num_elements + f.eigen_elements + f.grad_blocks for f in factors)
    texts = 256 * (len(model.state_dict()) + len(factors))
    return _SLACK + texts + 2 * state + 8 * elements


def encode(value: Any) -> list[bytes | bytearray]:
    """Return a message as buffers that follow each other. Tensors are copied to the CPU.

    Raises TypeError for what has no place in a message, with the place where it is.
    """
    tensors: list[Tensor] = []
    tree = _to_plain(value, tensors, "")
    head = json.dumps({"tree": tree, "tensors": [[_name(t), list(t.shape)] for t in tensors]}).encode()
    head += b" " * (-(len(head) + _LENGTH.size) % _ALIGNMENT)
    return [_LENGTH.pack(len(head)), head, *(_bytes_of(t) for t in tensors)]


def _to_plain(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Return JSON: a dict is ``{"d": ...}`` and a tensor ``{"t": number}``, so that no key can be mistaken for one."""
    if isinstance(value, Tensor):
        tensors.append(value)
        if _name(value) not in _DTYPES:
            raise TypeError(f"{where or 'a message'} is a tensor of {value.dtype}, which cannot be sent")
        return {"t": len(tensors) - 1}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"d": {key: _to_plain(item, tensors, f"{where}/{key}") for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_to_plain(item, tensors, f"{where}/{i}") for i, item in enumerate(value)]
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(
        f"{where or 'a message'} is a {type(value).__name__}: only tensors, numbers, strings, lists and dicts can be "
        f"sent"
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> bytearray:
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    data = bytearray(-(-flat.nbytes // _ALIGNMENT) * _ALIGNMENT)
    if flat.nbytes:
        torch.frombuffer(data, dtype=torch.uint8, count=flat.nbytes).copy_(flat.view(torch.uint8))
    return data


def to_tensor(value: Any) -> Tensor:
    """Return a message as bytes in one tensor on the CPU, a multiple of 16 of them."""
    return torch.frombuffer(bytearray().join(encode(value)), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Return the value of a message of bytes; tuples come back as lists. Raises ValueError if it is no message."""
    try:
        (size,) = _LENGTH.unpack(_text(data[: _LENGTH.size]))
        if size > len(data) - _LENGTH.size:
            raise ValueError("its head is longer than the message")
        position = _LENGTH.size + size
        head = json.loads(_text(data[_LENGTH.size : position]).decode())
        tensors = []
        for dtype, shape in head["tensors"]:
            tensor, position = _tensor_at(data, position, dtype, shape)
            tensors.append(tensor)
        if position != len(data):
            raise ValueError(f"it has {len(data) - position} bytes that belong to no tensor")
        return _from_plain(head["tree"], tensors)
    except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError, RuntimeError) as error:
        raise ValueError(f"not a message of dkfac: {error}") from error


def _text(data: Tensor) -> bytes:
    return bytes(data.numpy())


def _tensor_at(data: Tensor, position: int, name: str, shape: list[int]) -> tuple[Tensor, int]:
    """Return the tensor that begins at a position, and the position after it."""
    dtype = _DTYPES[name]
    if len(shape) > _MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor has shape {shape}")
    num_bytes = math.prod(shape) * dtype.itemsize
    end = position + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    if end > len(data):
        raise ValueError(f"a tensor of shape {shape} is longer than the message")
    return data[position : position + num_bytes].view(dtype).view(shape).clone(), end  # torch.save refuses views


def _from_plain(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, list):
        return [_from_plain(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"t"} and type(tree["t"]) is int and 0 <= tree["t"] < len(tensors):
        return tensors[tree["t"]]
    if tree.keys() == {"d"} and isinstance(tree["d"], dict):
        return {key: _from_plain(item, tensors) for key, item in tree["d"].items()}
    raise ValueError("it refers to a tensor that it does not have")
