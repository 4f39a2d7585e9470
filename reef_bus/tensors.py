"""A training loop's tensors as bytes of our own: copied once, so that the loop may go on writing to them.

Knows: dtypes' names, addresses, the buffer protocol. Must not know: any framework. It imports none: who hands in a
torch tensor has imported torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from reef_bus.backends import Piece, Pieces
from reef_bus.errors import Rejected
from reef_bus.manifest import ITEM_BYTES

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
"""torch's and numpy's names of what a manifest can carry."""


def copied(named: Mapping[str, Any]) -> Pieces:
    """A copy of every tensor in CPU memory, row-major: torch tensors on any device, whatever has a `dtype` and the
    buffer protocol, or pieces, such as a checkpoint's. Raises Rejected naming the tensor that cannot be published."""
    if not isinstance(named, Mapping) or not named or not all(isinstance(name, str) for name in named):
        found = f"names {list(named)[:3]}" if isinstance(named, Mapping) else f"a {type(named).__name__}"
        raise Rejected(f"found {found}; expected a mapping of names to tensors, such as dict(model.named_parameters())")
    pieces = {name: _copied(name, tensor) for name, tensor in named.items()}
    _refuse_aliases(named)
    return pieces


def _refuse_aliases(named: Mapping[str, Any]) -> None:
    """Tied weights are one tensor: under two names an engine would hold, and hash, what the model does not have."""
    seen: dict[object, str] = {}
    for name, tensor in named.items():
        first = seen.setdefault(_place(tensor), name)
        if first != name:
            raise Rejected(f"tensors {first!r} and {name!r} are the same memory; publish it under the one name")


def _place(tensor: Any) -> object:
    """Where its memory begins, if it says so and has any; else which object it is."""
    array = getattr(tensor, "__array_interface__", None)
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else array["data"][0] if array else 0
    empty = 0 in tuple(getattr(tensor, "shape", ()))
    return (str(getattr(tensor, "device", "")), address) if address and not empty else id(tensor)


def _copied(name: str, tensor: Any) -> Piece:
    if isinstance(tensor, Piece):
        return tensor._replace(data=memoryview(bytes(tensor.data)))
    dtype = DTYPES.get(str(getattr(tensor, "dtype", "")).removeprefix("torch."))
    if dtype is None:
        what = f"dtype {tensor.dtype}" if hasattr(tensor, "dtype") else f"a {type(tensor).__name__} without a dtype"
        raise Rejected(f"tensor {name!r}: found {what}; expected one of {', '.join(DTYPES)}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(name, tensor, dtype, torch)
    return _of_buffer(name, tensor, dtype)


def _of_torch(name: str, tensor: Any, dtype: str, torch: Any) -> Piece:
    """Whatever its device and strides: torch itself writes it, in order, into memory that is ours."""
    if tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "full_tensor"):
        kind = f"{type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise Rejected(f"tensor {name!r}: found a {kind}; expected all of its values: gather it first (full_tensor())")
    shape = tuple(tensor.shape)
    memory = bytearray(ITEM_BYTES[dtype] * math.prod(shape))
    if memory:
        torch.frombuffer(memory, dtype=tensor.dtype).view(shape).copy_(tensor.detach())
    return Piece(dtype, shape, memoryview(memory).toreadonly())


def _of_buffer(name: str, tensor: Any, dtype: str) -> Piece:
    try:
        view = memoryview(tensor)
    except (TypeError, ValueError) as error:  # numpy has no buffer for the dtypes that others added to it
        raise Rejected(f"tensor {name!r}: a {type(tensor).__name__} without the buffer protocol: {error}") from error
    if ITEM_BYTES[dtype] != view.itemsize:
        raise Rejected(f"tensor {name!r}: its dtype is {tensor.dtype}, its buffer has items of {view.itemsize} bytes")
    return Piece(dtype, tuple(view.shape or ()), memoryview(view.tobytes()))
