"""What the heavy blobs beside the log hold: token rows of answers, and batches of jobs.

Knows: their shape, in MessagePack. Must not know: where blobs are kept, or how a batch is chosen.
"""

from __future__ import annotations

import msgspec

from reef_bus.backends import Sample
from reef_bus.errors import ContractError
from reef_bus.events import Blob

MAX_SCORE = 1e6
"""The largest score, positive or negative: what one client reports must not spoil the batch that it falls into."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer, token by token: ids, the logprob of each sampled id, and the load id that produced each."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    load_ids: tuple[str, ...]


class Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training loop of somebody's own has made, durable before its job is dispatched."""

    weights: Blob
    manifest: str


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One job's input and commit context: training it again needs nothing else.

    `records` are the consumed records with their sequences; `floor` and `taken` are the processor's next state: up to
    `floor` nothing is wanted any more, `taken` are the consumed sequences above it. They speak of the records of
    `scenario` alone, whose adapter is trained; empty: of all that were wanted, as in every batch from before there was
    the field. With `given` there are neither samples nor records, and nothing is left to train.
    """

    job: str
    step: int
    base: str
    seed: int
    samples: tuple[Sample, ...]
    records: tuple[tuple[str, int], ...]
    floor: int
    taken: tuple[int, ...]
    given: Given | None = None
    scenario: str = ""


_ROWS = msgspec.msgpack.Decoder(list[TokenRow])
_BATCH = msgspec.msgpack.Decoder(Batch)


def encode_rows(rows: list[TokenRow]) -> bytes:
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> list[TokenRow]:
    """Raises ContractError when the blob holds anything else."""
    try:
        return _ROWS.decode(data)
    except msgspec.DecodeError as error:
        raise ContractError(f"a blob of {len(data)} bytes does not hold token rows: {error}") from error


def encode_batch(batch: Batch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """Raises ContractError when the blob holds anything else."""
    try:
        return _BATCH.decode(data)
    except msgspec.DecodeError as error:
        raise ContractError(f"a blob of {len(data)} bytes does not hold a batch: {error}") from error
