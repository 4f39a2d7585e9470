"""A loop's tensors as bytes: whatever their dtype, strides or kind, copied, and refused by name where that cannot be.

Knows: torch, numpy, the bytes that they must become. Must not know: who publishes them.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from reef_bus.errors import Rejected
from reef_bus.tensors import DTYPES, copied

TORCH = sorted(set(DTYPES) - {"uint16", "uint32", "uint64"})
NUMPY = sorted(set(DTYPES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"})


def test_a_torch_tensor_becomes_its_values_in_little_endian_row_major_order() -> None:
    piece = copied({"w": torch.tensor([[1.0, -2.0], [0.5, 3.0]])})["w"]
    assert (piece.dtype, piece.shape, bytes(piece.data)) == ("F32", (2, 2), struct.pack("<4f", 1.0, -2.0, 0.5, 3.0))


def test_bfloat16_keeps_its_bits() -> None:
    piece = copied({"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)})["w"]
    assert (piece.dtype, bytes(piece.data)) == ("BF16", b"\x80\x3f\x00\xc0")


@pytest.mark.parametrize("dtype", TORCH)
def test_every_dtype_of_torch_has_as_many_bytes_as_torch_says(dtype: str) -> None:
    tensor = torch.zeros(3, dtype=getattr(torch, dtype))
    piece = copied({"w": tensor})["w"]
    assert piece.dtype == DTYPES[dtype] and piece.data.nbytes == tensor.nbytes


@pytest.mark.parametrize("dtype", NUMPY)
def test_every_dtype_of_numpy_is_taken_by_the_buffer_protocol(dtype: str) -> None:
    array = np.arange(3).astype(dtype)
    piece = copied({"w": array})["w"]
    assert (piece.dtype, piece.shape, bytes(piece.data)) == (DTYPES[dtype], (3,), array.tobytes())


@pytest.mark.parametrize("made", [torch.arange(6.0).view(2, 3).t(), np.arange(6, dtype="float32").reshape(2, 3).T])
def test_what_does_not_lie_in_order_is_copied_in_order(made: Any) -> None:
    piece = copied({"w": made})["w"]
    assert (piece.shape, bytes(piece.data)) == ((3, 2), struct.pack("<6f", 0, 3, 1, 4, 2, 5))


@pytest.mark.parametrize("made", [torch.ones(4), np.ones(4, dtype="float32")])
def test_a_copy_is_not_changed_by_the_next_step(made: Any) -> None:
    piece = copied({"w": made})["w"]
    made[:] = 7
    assert bytes(piece.data) == struct.pack("<4f", 1, 1, 1, 1) and piece.data.readonly


def test_a_parameter_that_wants_a_gradient_is_taken_without_it() -> None:
    assert copied({"w": torch.nn.Parameter(torch.ones(1))})["w"].data.nbytes == 4


def test_scalars_and_empty_tensors_have_their_shapes() -> None:
    found = copied({"a": torch.tensor(2.0), "b": torch.empty(0, 4), "c": torch.empty(0, 4), "d": np.float32(2)})
    assert {name: (piece.shape, piece.data.nbytes) for name, piece in found.items()} == {
        **{"a": ((), 4), "b": ((0, 4), 0), "c": ((0, 4), 0), "d": ((), 4)}
    }


def test_views_of_one_storage_that_begin_elsewhere_are_tensors_of_their_own() -> None:
    flat = torch.arange(4.0)
    assert len(copied({"a": flat[:2], "b": flat[2:]})) == 2


@pytest.mark.parametrize("made", [torch.ones(2, 2), np.ones((2, 2), dtype="float32")])
def test_tied_weights_are_refused_by_both_of_their_names(made: Any) -> None:
    with pytest.raises(Rejected, match=r"'embed' and 'head' are the same memory"):
        copied({"embed": made, "head": made})
    with pytest.raises(Rejected, match=r"'embed' and 'head' are the same memory"):
        copied({"embed": made, "head": made.reshape(4)})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.ones(2, dtype=torch.complex128), r"tensor 'w': found dtype torch.complex128; expected one of bool"),
        (np.ones(2, dtype=">f4"), r"tensor 'w': found dtype >f4"),
        (np.array(["a"]), r"tensor 'w': found dtype <U1"),
        (b"1234", r"tensor 'w': found a bytes without a dtype"),
        ([1.0], r"tensor 'w': found a list without a dtype"),
        (torch.ones(2, device="meta"), r"tensor 'w': found a Tensor of layout torch.strided on meta"),
        (torch.eye(2).to_sparse(), r"tensor 'w': found a Tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_published_is_named_with_what_was_found(made: Any, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        copied({"v": torch.ones(1), "w": made})


class Typed(bytearray):
    """A buffer that says of itself what it is not."""

    dtype = "float32"


def test_a_buffer_whose_items_are_not_of_its_dtype_is_refused() -> None:
    with pytest.raises(Rejected, match=r"its dtype is float32, its buffer has items of 1 bytes"):
        copied({"w": Typed(8)})


@pytest.mark.parametrize("named", [{}, None, [("w", torch.ones(1))], {0: torch.ones(1)}])
def test_nothing_or_no_mapping_is_refused(named: Any) -> None:
    with pytest.raises(Rejected, match="expected a mapping of names to tensors"):
        copied(named)
