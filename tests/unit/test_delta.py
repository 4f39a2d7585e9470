"""A delta gives exactly its target or is refused, by name, before a byte is written.

Knows: the format, read here by a second, slow reader. Must not know: numpy.
"""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
import xxhash

from reef_bus.backends import Piece, Pieces
from reef_bus.delta import apply, encode, rebuild
from reef_bus.delta.buckets import Slice, cut, zstd
from reef_bus.delta.frames import BUCKET_LIMIT, Form, Header, Record, read, write_header, write_record
from reef_bus.errors import ContractError, DeltaError, TransferError
from reef_bus.manifest import Manifest, describe

HEAD = 34  # <IBBIQ and 16 bytes of checksum


def u16(*values: int, dtype: str = "BF16") -> Piece:
    return Piece(dtype, (len(values),), memoryview(struct.pack(f"<{len(values)}H", *values)))


def raw(data: bytes, dtype: str = "U8") -> Piece:
    return Piece(dtype, (len(data),), memoryview(data))


def room(like: Pieces) -> dict[str, Piece]:
    """Memory of the same layout, full of a byte that no test expects."""
    return {
        name: piece._replace(data=memoryview(bytearray(b"\xa5" * piece.data.nbytes))) for name, piece in like.items()
    }


def contents(pieces: Pieces) -> dict[str, bytes]:
    return {name: bytes(piece.data) for name, piece in pieces.items()}


def delta_of(base: Pieces, new: Pieces, bucket_bytes: int = 64) -> bytes:
    return b"".join(encode(base, describe(base), new, describe(new), bucket_bytes=bucket_bytes))


def forms(delta: bytes) -> list[Form]:
    return [record.form for record in read(delta)[1]]


# 100 values of BF16 in which the first 64 bytes do not change and one later value moves by one; and a norm in F32.
BASE: dict[str, Piece] = {
    "a.weight": u16(*range(0x3C00, 0x3C64)),
    "b.norm": Piece("F32", (2,), memoryview(struct.pack("<2f", 1.0, -0.0))),
}
NEW: dict[str, Piece] = {
    "a.weight": u16(*range(0x3C00, 0x3C28), 0x3C27, *range(0x3C29, 0x3C64)),
    "b.norm": Piece("F32", (2,), memoryview(struct.pack("<2f", 1.0, 0.0))),
}
DELTA = delta_of(BASE, NEW)
HELD, TARGET = describe(BASE), describe(NEW)
OTHER = describe({**BASE, "b.norm": Piece("F32", (2,), memoryview(struct.pack("<2f", 3.0, 4.0)))})


def refused(flaw: str, delta: bytes, held: Manifest = HELD, target: Manifest = TARGET) -> DeltaError:
    """Refused with that flaw; neither the base nor the staging has changed."""
    base = {name: piece._replace(data=memoryview(bytearray(piece.data))) for name, piece in BASE.items()}
    staging = room(NEW)
    with pytest.raises(DeltaError) as caught:
        apply(delta, base, held, staging, target)
    assert caught.value.flaw == flaw, caught.value
    assert caught.value.cause == ("mismatch" if flaw in ("base", "target", "layout") else "protocol")
    assert contents(base) == contents(BASE)
    assert contents(staging) == contents(room(NEW))
    return caught.value


def header(**changes: object) -> Header:
    fields = {"base": HELD.digest, "target": TARGET.digest, "total": 208, "bucket_bytes": 64, "buckets": 5, **changes}
    return Header(**fields)  # type: ignore[arg-type]


def spelled(records: list[Record], head: Header | None = None) -> bytes:
    """A delta with true checksums, whatever it says."""
    said = head or header(buckets=len(records))
    return write_header(said) + b"".join(write_record(said, n, record) for n, record in enumerate(records))


def genuine(index: int, record: Record) -> bytes:
    """DELTA with one record replaced, its checksum true."""
    records = read(DELTA)[1]
    return spelled([*records[:index], record, *records[index + 1 :]], read(DELTA)[0])


# What is written, and what comes out.


def test_the_target_is_rebuilt_beside_the_base() -> None:
    staging = room(NEW)
    rebuild(DELTA, BASE, HELD, staging, TARGET)
    assert contents(staging) == contents(NEW)


def test_each_bucket_has_the_form_that_it_needs() -> None:
    # 200 bytes of BF16 make 64 + 64 + 64 + 8; value 40 lies in the second. Two values of F32 make one of 8 bytes.
    assert forms(DELTA) == [Form.UNCHANGED, Form.SPARSE, Form.UNCHANGED, Form.UNCHANGED, Form.FULL]


def test_an_unchanged_version_costs_its_heads_only() -> None:
    delta = delta_of(BASE, BASE)
    (length,) = struct.unpack_from("<I", delta, 8)
    assert len(delta) == 8 + 4 + length + 16 + 5 * HEAD
    staging = room(BASE)
    rebuild(delta, BASE, HELD, staging, HELD)
    assert contents(staging) == contents(BASE)


def test_a_second_reader_of_the_format_finds_the_same_bytes() -> None:
    """The format in plain Python: magic, header, records; gaps and folded steps by planes of bytes."""
    assert DELTA[:8] == b"REEFDLTA"
    (length,) = struct.unpack_from("<I", DELTA, 8)
    body = DELTA[12 : 12 + length]
    assert json.loads(body) == {
        "format": "reef-delta.v1", "base": HELD.digest, "target": TARGET.digest,
        "total": 208, "bucket_bytes": 64, "buckets": 5,
    }  # fmt: skip
    seal = DELTA[12 + length : 28 + length]
    assert seal == xxhash.xxh3_128_digest(body)
    found = list(plain_records(DELTA, 28 + length, seal))
    assert [index for index, *_ in found] == [0, 1, 2, 3, 4]
    _, form, gap_bytes, changed, payload = found[1]
    assert (form, gap_bytes, changed) == (1, 1, 1)
    assert zstd.decompress(payload) == bytes([8, 1, 0])  # after 8 unchanged values one goes down by 1: folded, 1
    assert found[4][1] == 3 and found[4][4] == struct.pack("<2f", 1.0, 0.0)


def plain_records(delta: bytes, at: int, seal: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    while at < len(delta):
        index, form, gap_bytes, changed, length = struct.unpack_from("<IBBIQ", delta, at)
        payload = delta[at + HEAD : at + HEAD + length]
        assert delta[at + 18 : at + HEAD] == xxhash.xxh3_128_digest(seal + delta[at : at + 18] + payload)
        yield index, form, gap_bytes, changed, payload
        at += HEAD + length


@pytest.mark.parametrize(
    ("changed", "form"), [(0, Form.UNCHANGED), (1, Form.SPARSE), (200, Form.SPARSE), (20_000, Form.DENSE)]
)
def test_the_share_of_changed_values_decides_the_form(changed: int, form: Form) -> None:
    base = {"w": u16(*(0x3C00 + n % 512 for n in range(20_000)))}
    new = {
        "w": u16(*(0x3C00 + n % 512 + (n * changed // 20_000 != (n - 1) * changed // 20_000) for n in range(20_000)))
    }
    assert forms(delta_of(base, new, 40_000)) == [form]
    exact(base, new, 40_000)


@pytest.mark.parametrize(("share", "form"), [(0.1, Form.SPARSE), (0.4, Form.SPARSE), (0.65, Form.DENSE)])
def test_of_two_forms_that_fit_the_smaller_is_taken(share: float, form: Form) -> None:
    """Three in five steps go up by one, the others down. Up to two values of three, the sparse form has room."""
    chance = random.Random(0)
    old = [0x3C00 + n % 512 for n in range(20_000)]
    new = [value + chance.choice([1, 1, 1, -1, -1]) * (chance.random() < share) for value in old]
    assert forms(delta_of({"w": u16(*old)}, {"w": u16(*new)}, 40_000)) == [form]


@pytest.mark.parametrize("at", [0, 255, 256, 257, 65_535, 65_536, 65_537, 69_999])
def test_a_single_change_is_found_however_far_it_lies(at: int) -> None:
    old = [0x3C00] * 70_000
    exact({"w": u16(*old)}, {"w": u16(*old[:at], 0x3BFF, *old[at + 1 :])}, 140_000)


@pytest.mark.parametrize("touched", ["abcde", "a", "c", "e", "bd"])
def test_changes_in_any_of_the_tensors_that_share_a_bucket_are_found(touched: str) -> None:
    """The tensors differ in size, so that no change can land in another one unseen."""
    old = {name: [0x3C00 + n for n in range(200 + 50 * place)] for place, name in enumerate("abcde")}
    new = {name: [v + (name in touched and n % 70 == 3) for n, v in enumerate(values)] for name, values in old.items()}
    base, target = ({name: u16(*values) for name, values in each.items()} for each in (old, new))
    assert forms(delta_of(base, target, 4096)) == [Form.SPARSE]
    exact(base, target, 4096)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.51, 0.6, 0.7, 0.8, 0.95, 1.0])
def test_no_share_of_changes_makes_a_bucket_that_its_reader_refuses(width: int, share: float) -> None:
    """All steps are alike and lie together: each form takes next to nothing."""
    count = 16_000 // width
    old = [n % 100 for n in range(count)]
    new = [value + (n < share * count) for n, value in enumerate(old)]
    exact({"w": whole(old, width)}, {"w": whole(new, width)}, 16_000)


def whole(values: list[int], width: int) -> Piece:
    data = struct.pack(f"<{len(values)}{'BHIQ'[(1, 2, 4, 8).index(width)]}", *values)
    return Piece(f"U{8 * width}", (len(values),), memoryview(data))


def exact(base: Pieces, new: Pieces, bucket_bytes: int) -> None:
    staging = room(new)
    rebuild(delta_of(base, new, bucket_bytes), base, describe(base), staging, describe(new))
    assert contents(staging) == contents(new)


def test_bytes_without_a_likeness_are_sent_as_they_are() -> None:
    base, new = raw(bytes(4096)), raw(b"".join(xxhash.xxh3_128_digest(bytes([n])) for n in range(256)))
    assert forms(delta_of({"w": base}, {"w": new}, 4096)) == [Form.FULL]


def test_a_large_tensor_is_split_and_small_ones_share_a_bucket_of_their_width() -> None:
    pieces = {"a": raw(bytes(20)), "b": u16(1, 2), "c": raw(bytes(3)), "d": u16(*range(7)), "e": raw(b"")}
    assert [(bucket.width, bucket.slices) for bucket in cut(describe(pieces), 16)] == [
        (1, (Slice("a", 0, 16),)),
        (1, (Slice("a", 16, 20), Slice("c", 0, 3))),
        (2, (Slice("b", 0, 4), Slice("d", 0, 12))),
        (2, (Slice("d", 12, 14),)),
    ]


# What is refused.


def test_any_other_file_is_foreign() -> None:
    assert "REEFDLTA" in str(refused("foreign", b'{"__metadata__": {}}'))


def test_a_later_format_is_foreign() -> None:
    body = json.dumps({"format": "reef-delta.v2"}).encode()
    later = b"REEFDLTA" + struct.pack("<I", len(body)) + body + xxhash.xxh3_128_digest(body)
    assert "reef-delta.v1" in str(refused("foreign", later))


def test_another_spelling_of_the_header_is_foreign() -> None:
    body = json.dumps(json.loads(DELTA[12 : DELTA.index(b"}") + 1]), indent=1).encode()
    loose = b"REEFDLTA" + struct.pack("<I", len(body)) + body + xxhash.xxh3_128_digest(body)
    refused("foreign", loose)


def test_every_cut_is_told_as_one() -> None:
    for length in range(len(DELTA)):
        refused("truncated", DELTA[:length])


def test_every_flipped_bit_is_refused_before_a_byte_is_written() -> None:
    for bit in range(8 * len(DELTA)):
        flipped = bytearray(DELTA)
        flipped[bit // 8] ^= 1 << bit % 8
        staging = room(NEW)
        with pytest.raises(DeltaError) as caught:
            apply(bytes(flipped), BASE, HELD, staging, TARGET)
        assert caught.value.flaw in ("foreign", "truncated", "damaged", "oversized"), caught.value
        assert contents(staging) == contents(room(NEW))


def test_buckets_in_another_order_are_told() -> None:
    start, end = DELTA.index(b"}") + 17, len(DELTA)
    first, second = DELTA[start : start + HEAD], DELTA[start + HEAD : end - 2 * HEAD - HEAD - 8]
    rest = DELTA[start + HEAD + len(second) :]
    assert DELTA == DELTA[:start] + first + second + rest
    refused("reordered", DELTA[:start] + second + first + rest)


def test_a_bucket_twice_is_told() -> None:
    start = DELTA.index(b"}") + 17
    refused("reordered", DELTA[: start + HEAD] + DELTA[start:])


def test_a_bucket_of_another_delta_is_damage() -> None:
    other = delta_of(BASE, BASE)
    at, there = DELTA.index(b"}") + 17, other.index(b"}") + 17
    refused("damaged", DELTA[:at] + other[there : there + HEAD] + DELTA[at + HEAD :])


def test_what_follows_the_end_is_told() -> None:
    refused("trailing", DELTA + b"\0")
    refused("trailing", DELTA + DELTA)


def test_a_delta_for_another_base_is_told() -> None:
    said = str(refused("base", DELTA, held=OTHER))
    assert HELD.digest in said and OTHER.digest in said


def test_a_delta_to_another_target_is_told() -> None:
    said = str(refused("target", DELTA, target=OTHER))
    assert TARGET.digest in said and OTHER.digest in said


def test_a_delta_with_too_few_or_too_many_buckets_is_for_another_target() -> None:
    refused("target", spelled(read(DELTA)[1][:4]))
    refused("target", spelled([*read(DELTA)[1], Record(Form.UNCHANGED)]))
    refused("target", spelled(read(DELTA)[1], header(total=207)))


def test_versions_of_other_tensors_have_no_delta() -> None:
    fewer = {"a.weight": NEW["a.weight"]}
    with pytest.raises(DeltaError, match=r"'b\.norm'") as caught:
        encode(BASE, HELD, fewer, describe(fewer))
    assert (caught.value.flaw, caught.value.cause) == ("layout", "mismatch")


def test_a_delta_between_versions_of_other_tensors_is_refused() -> None:
    """No encoder makes one."""
    fewer = describe({"a.weight": NEW["a.weight"]})
    refused("layout", spelled(read(DELTA)[1][:4], Header(HELD.digest, fewer.digest, 200, 64, 4)), target=fewer)


def test_pieces_that_do_not_fit_their_manifest_are_refused() -> None:
    short = {**BASE, "b.norm": u16(1)}
    with pytest.raises(TransferError, match=r"'b\.norm'"):
        encode(short, HELD, NEW, TARGET)
    with pytest.raises(TransferError, match=r"'b\.norm'"):
        encode(BASE, HELD, short, TARGET)
    with pytest.raises(TransferError, match=r"'b\.norm'"):
        apply(DELTA, BASE, HELD, room(short), TARGET)
    with pytest.raises(TransferError, match=r"'b\.norm'"):
        apply(DELTA, short, HELD, room(NEW), TARGET)
    with pytest.raises(TransferError, match="cannot be written"):
        apply(DELTA, BASE, HELD, NEW, TARGET)


def test_the_base_is_never_written_in_place() -> None:
    shared = room(BASE)
    with pytest.raises(ContractError, match="shares memory"):
        apply(DELTA, shared, HELD, shared, TARGET)


def test_a_staging_that_overlaps_the_base_by_a_byte_is_refused() -> None:
    memory = memoryview(bytearray(207))
    base = {"a": Piece("U8", (100,), memory[:100])}
    into = {"a": Piece("U8", (100,), memory[99:199])}
    held = describe(base)
    with pytest.raises(ContractError, match="shares memory"):
        apply(delta_of(base, base), base, held, into, held)
    beside = {"a": Piece("U8", (100,), memory[100:200])}
    rebuild(delta_of(base, base), base, held, beside, held)


def test_tensors_of_one_version_may_share_memory() -> None:
    """Tied embeddings do."""
    shared = u16(1, 2, 3)
    tied = {"embed": shared, "head": shared}
    held = describe(tied)
    staging = room(tied)
    rebuild(delta_of(tied, tied), tied, held, staging, held)
    assert contents(staging) == contents(tied)


def test_an_abandoned_delta_writes_nothing_any_more() -> None:
    staging = room(NEW)
    steps = apply(DELTA, BASE, HELD, staging, TARGET)
    assert [next(steps), next(steps)] == [64, 64]
    steps.close()  # type: ignore[attr-defined]
    assert bytes(staging["a.weight"].data) == bytes(NEW["a.weight"].data[:128]) + b"\xa5" * 72


def test_a_base_that_holds_other_bytes_than_it_was_found_to_hold_is_told_by_the_result() -> None:
    lying = {**BASE, "a.weight": u16(*range(0x3C01, 0x3C65))}
    with pytest.raises(DeltaError, match=r"'a\.weight'") as caught:
        rebuild(DELTA, lying, HELD, room(NEW), TARGET)
    assert (caught.value.flaw, caught.value.cause) == ("result", "mismatch")


# Records that are whole, and lie.


@pytest.mark.parametrize(
    ("flaw", "record"),
    [
        ("damaged", Record(Form.FULL, b"1234567")),
        ("oversized", Record(Form.FULL, b"123456789")),
        ("oversized", Record(Form.UNCHANGED, b"1")),
        ("oversized", Record(Form.SPARSE, zstd.compress(bytes(10)), 2, 1)),  # 2 * (1 + 4) is more than 8 bytes
        ("oversized", Record(Form.SPARSE, zstd.compress(bytes(8)), 0xFFFFFFFF, 4)),
        ("damaged", Record(Form.SPARSE, zstd.compress(bytes(8)), 1, 5)),
        ("damaged", Record(Form.SPARSE, zstd.compress(b""), 0, 1)),
        ("damaged", Record(Form.SPARSE, zstd.compress(bytes(4)), 1, 0)),
        ("damaged", Record(Form.UNCHANGED, b"", 1, 0)),
        ("damaged", Record(Form.FULL, bytes(8), 0, 1)),
        ("oversized", Record(Form.DENSE, zstd.compress(bytes(1 << 20)))),
        ("damaged", Record(Form.DENSE, zstd.compress(bytes(7)))),
        ("damaged", Record(Form.DENSE, b"no zstd frame")),
        ("damaged", Record(Form.DENSE, b"")),
    ],
)
def test_a_bucket_that_declares_what_it_cannot_hold_is_refused_before_a_byte_is_written(
    flaw: str, record: Record
) -> None:
    refused(flaw, genuine(4, record))


def test_a_frame_that_hides_its_size_is_refused() -> None:
    packer = zstd.ZstdCompressor()
    unsized = packer.compress(bytes(4)) + packer.compress(bytes(4)) + packer.flush()
    refused("oversized", genuine(4, Record(Form.DENSE, unsized)))


@pytest.mark.parametrize(
    "payload",
    [
        zstd.compress(bytes(8))[:-1],  # cut
        zstd.compress(bytes(8)) + zstd.compress(bytes(8)),  # two frames
        zstd.compress(bytes(8)) + b"\0",
        bytes.fromhex("28b52ffd 20 08 470000"),  # RFC 8878: 8 bytes of content, in a block of the type that is reserved
    ],
)
def test_a_frame_that_is_not_exactly_one_is_damage(payload: bytes) -> None:
    steps = apply(genuine(4, Record(Form.DENSE, payload)), BASE, HELD, room(NEW), TARGET)
    with pytest.raises(DeltaError) as caught:
        list(steps)
    assert caught.value.flaw == "damaged"


def test_a_change_beyond_the_bucket_is_damage() -> None:
    beyond = Record(Form.SPARSE, zstd.compress(bytes([32, 1, 0])), 1, 1)  # value 32 of 0 to 31
    with pytest.raises(DeltaError, match="value 32") as caught:
        list(apply(genuine(1, beyond), BASE, HELD, room(NEW), TARGET))
    assert caught.value.flaw == "damaged"


def test_a_bomb_allocates_nothing_to_speak_of() -> None:
    bomb = genuine(4, Record(Form.DENSE, zstd.compress(bytes(256 << 20))))
    tracemalloc.start()
    refused("oversized", bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_header_that_cuts_a_large_version_into_crumbs_allocates_nothing_to_speak_of() -> None:
    base = {"w": raw(bytes(8 << 20))}
    held = describe(base)
    crumbs = spelled([Record(Form.UNCHANGED)], Header(held.digest, held.digest, 8 << 20, 8, 1))
    into = room(base)
    tracemalloc.start()
    with pytest.raises(DeltaError, match=r"1 buckets.* has more") as caught:
        apply(crumbs, base, held, into, held)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.flaw == "target"
    assert peak < 1 << 20


@pytest.mark.parametrize("bucket_bytes", [-8, 0, 4, 12, BUCKET_LIMIT + 8, 1 << 62])
def test_buckets_beyond_their_bounds_are_refused_by_whoever_reads_or_writes(bucket_bytes: int) -> None:
    refused("oversized", spelled([], header(bucket_bytes=bucket_bytes)))
    with pytest.raises(DeltaError, match=f"buckets of {bucket_bytes} bytes"):
        encode(BASE, HELD, NEW, TARGET, bucket_bytes=bucket_bytes)


def test_a_header_beyond_its_bound_is_refused() -> None:
    refused("oversized", b"REEFDLTA" + struct.pack("<I", 1 << 30) + bytes(64))


def test_an_unknown_form_is_foreign() -> None:
    refused("foreign", genuine(4, Record(4, b"")))  # type: ignore[arg-type]
