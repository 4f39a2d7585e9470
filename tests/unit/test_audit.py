"""Histories: read from a journal up to one moment, written as an export, read back, and bad lines named.

Knows: the in-memory journal, an artifact store. Must not know: what the audit finds in a history.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
from pathlib import Path

import pytest

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, audit_export, audit_history, consumption, read_export, read_history, write_export
from reef_bus.backends import Sample
from reef_bus.core.invariants import Consumption, Trained, Unread, check
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import Blob, Draft, Event, InferenceRecorded, JobDispatched, ReportReceived
from reef_bus.journal import LOG, RECORDS, MemoryJournal, MemoryStreams
from reef_bus.samples import Batch, encode_batch
from tests.bench.audit import history
from tests.facts import L, S, dropped, holds, joined, opened, registered, trainer_joined

BOOTS = {"deployment": "s1", "train": "t1", "engine.e0": "e0.1"}

BATCH = Batch(
    job="j1",
    step=1,
    base="base",
    seed=3,
    samples=(
        Sample(
            record="r1", group="g", prompt=(11, 7, 10), completion=(7,), logprobs=(-0.25,), load_id=L(0), reward=0.125
        ),
    ),
    records=(("r1", 1),),
    floor=1,
    taken=(),
)


def answered(as_of: int) -> InferenceRecorded:
    return InferenceRecorded(
        scenario=S,
        record="r1",
        engine="e0",
        boot="e0.1",
        load_id=L(0),
        as_of=as_of,
        done_as_of=as_of,
        prompt="7",
        answer="7 – “so”",
        prompt_tokens=3,
        answer_tokens=1,
        temperature=1.0,
        blob=Blob("0" * 64, 10),
        row=0,
        tags={"phase": "final"},
    )


REPORTED = ReportReceived(
    scenario=S, report="f1", references=("r1",), score=0.125, feedback="good", metadata={"a": [1, None, 0.1]}
)


async def told(store: ArtifactStore) -> MemoryJournal:
    """Seven events of LOG, among them one job over one answer, and two of RECORDS."""
    journal, tails = MemoryJournal(MemoryStreams(clock=lambda: 1_700_000_000_000_000_123)), dict[str, int]()

    async def say(event: Event) -> None:
        boot = BOOTS.get(event.chain, "g1")
        draft = Draft(event=event, writer="w", boot=boot, cause=1, correlation="x")
        prev = 0 if event.family == "record" else tails.get(event.chain, 0)
        tails[event.chain] = (await journal.append(draft, prev)).seq

    for event in (opened(), trainer_joined(), registered(), joined("e0"), holds("e0", 0, "base")):
        await say(event)
    await say(answered(as_of=5))
    await say(REPORTED)
    blob = store.put(encode_batch(BATCH))
    await say(JobDispatched(scenario=S, job="j1", step=1, base="base", batch=blob, records=1))
    await say(dropped("j1"))
    return journal


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


# -- live


async def test_a_history_is_both_streams_and_the_batches_of_its_jobs(store: ArtifactStore) -> None:
    history = await read_history(await told(store), store)
    assert [r.seq for r in history.log] == [1, 2, 3, 4, 5, 6, 7]
    assert [r.name for r in history.records] == ["InferenceRecorded", "ReportReceived"]
    assert list((history.batches or {}).values()) == [
        Consumption(job="j1", step=1, base="base", records=(("r1", 1),), samples=(Trained("r1", L(0), 0.125),))
    ]
    audit = check(history.log, history.records, history.batches)
    assert (audit.violations, audit.unchecked, audit.final.mean) == ((), (), 0.125)


async def test_without_a_store_there_are_no_batches(store: ArtifactStore) -> None:
    assert (await read_history(await told(store))).batches is None


async def test_empty_streams_are_an_empty_history() -> None:
    assert await read_history(MemoryJournal(MemoryStreams())) == History((), (), None)


async def test_a_missing_batch_and_a_damaged_one_are_told_apart(store: ArtifactStore) -> None:
    journal = await told(store)
    path = next(p for p in store.root.rglob("*") if p.is_file())
    path.chmod(0o644)
    path.write_bytes(b"rubbish")
    damaged = await read_history(journal, store)
    path.unlink()
    missing = await read_history(journal, store)
    whys = [b.why for history in (damaged, missing) for b in (history.batches or {}).values() if isinstance(b, Unread)]
    assert "is damaged" in whys[0] and "no blob at" in whys[1]


async def test_what_is_appended_while_it_is_read_is_left_for_the_next_time(store: ArtifactStore) -> None:
    class Busy(MemoryJournal):
        """Somebody appends as soon as the heads are known."""

        asked = 0

        async def head(self, stream: str) -> int:
            found = await super().head(stream)
            self.asked += 1
            if self.asked == 3:
                draft = Draft(event=holds("e0", 0, "base"), writer="w", boot="e0.1")
                await self.append(draft, 5)
                await self.append(Draft(event=REPORTED, writer="w", boot="g1"), 0)
            return found

    streams = (await told(store)).streams
    streams.ids.clear()  # the duplicate window is over
    history = await read_history(Busy(streams))
    assert (len(history.log), len(history.records)) == (7, 2)
    assert (len(streams.messages[LOG]), len(streams.messages[RECORDS])) == (8, 3)


async def test_a_moment_is_one_at_which_log_rests(store: ArtifactStore) -> None:
    """An answer of RECORDS may stand on what LOG got after its first look; so LOG is looked at again."""

    log_heads = iter((5, 6, 7, 7))

    class Moving(MemoryJournal):
        async def head(self, stream: str) -> int:
            await asyncio.sleep(0)
            return next(log_heads) if stream == LOG else 2

    history = await read_history(Moving((await told(store)).streams))
    assert (len(history.log), len(history.records)) == (7, 2)


async def test_a_log_that_never_rests_is_unavailable() -> None:
    class Restless(MemoryJournal):
        moved = 0

        async def head(self, stream: str) -> int:
            self.moved += stream == LOG
            return self.moved

    with pytest.raises(Unavailable, match="audit again"):
        await read_history(Restless(MemoryStreams()))


def test_a_consumption_is_the_batch_without_its_tokens() -> None:
    found = consumption(BATCH)
    assert (found.job, found.step, found.base, found.records) == ("j1", 1, "base", (("r1", 1),))
    assert found.samples == (Trained("r1", L(0), 0.125),)


# -- exports


@pytest.fixture
async def exported(store: ArtifactStore, tmp_path: Path) -> Path:
    path = tmp_path / "history.jsonl"
    write_export(await read_history(await told(store), store), path)
    return path


async def test_an_export_gives_the_same_history_without_the_store(store: ArtifactStore, tmp_path: Path) -> None:
    history = await read_history(await told(store), store)
    write_export(history, tmp_path / "history.jsonl")
    assert read_export(tmp_path / "history.jsonl") == history


async def test_an_export_goes_to_an_open_file_too(exported: Path) -> None:
    out = io.StringIO()
    write_export(read_export(exported), out)
    assert out.getvalue() == exported.read_text(encoding="utf-8")


async def test_a_batch_that_could_not_be_read_stays_one(tmp_path: Path) -> None:
    history = History((), (), {"d": Unread("it was lost")})
    write_export(history, tmp_path / "history.jsonl")
    assert read_export(str(tmp_path / "history.jsonl")) == history


async def test_every_line_is_one_cloud_event_or_one_batch(exported: Path) -> None:
    lines = [json.loads(line) for line in exported.read_text(encoding="utf-8").splitlines()]
    assert [line["stream"] for line in lines] == [LOG] * 7 + [RECORDS] * 2 + ["BATCH"]
    assert (lines[7]["type"], lines[7]["data"]["answer"]) == ("reef.InferenceRecorded.v1", "7 – “so”")
    assert (lines[9]["job"], lines[9]["records"], lines[9]["samples"]) == ("j1", [["r1", 1]], [["r1", L(0), 0.125]])
    assert set(lines[9]) == {"stream", "digest", "job", "step", "base", "records", "samples"}


BAD_LINES = {
    "no JSON": (b"{nonsense}\n", "line 3: .*one JSON object"),
    "no text": (b"\xff\xfe\n", "line 3: .*one JSON object"),
    "no object": (b"[1, 2]\n", "line 3: .*one JSON object"),
    "empty": (b"\n", "line 3: .*one JSON object"),
    "no stream": (b'{"sequence": 3}\n', "line 3: stream is None"),
    "another stream": (b'{"stream": "SITES"}\n', "line 3: stream is 'SITES'"),
    "a stream that is no text": (b'{"stream": ["LOG"]}\n', "line 3: stream is"),
    "no event": (b'{"stream": "LOG", "sequence": 3}\n', "line 3: .*lacks"),
    "a batch without a name": (b'{"stream": "BATCH", "job": "j"}\n', "line 3: a batch without a digest"),
    "half a batch": (b'{"stream": "BATCH", "digest": "d", "job": "j"}\n', "line 3: this is no batch"),
}


@pytest.mark.parametrize(("line", "expected"), BAD_LINES.values(), ids=BAD_LINES.keys())
async def test_a_bad_line_is_named(exported: Path, line: bytes, expected: str) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    exported.write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(ContractError, match=expected):
        read_export(exported)


async def test_a_foreign_event_is_named_with_its_line_and_its_sequence(exported: Path) -> None:
    text = exported.read_text(encoding="utf-8").replace("reef.EngineJoined.v1", "reef.EngineTeleported.v1")
    exported.write_text(text, encoding="utf-8")
    with pytest.raises(ContractError, match=r"line 4: event 4 .*EngineTeleported") as caught:
        read_export(exported)
    assert caught.value.seq == 4


async def test_an_event_of_the_other_stream_is_named(exported: Path) -> None:
    lines = exported.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[7] = lines[7].replace('"stream":"RECORDS"', '"stream":"LOG"')
    exported.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(ContractError, match="line 8: InferenceRecorded is on LOG; it belongs on RECORDS"):
        read_export(exported)


async def test_a_cut_last_line_is_named_and_a_missing_newline_is_none(exported: Path) -> None:
    whole = exported.read_bytes()
    exported.write_bytes(whole.rstrip(b"\n"))
    assert len(read_export(exported).log) == 7
    exported.write_bytes(whole[:-20])
    with pytest.raises(ContractError, match="line 10: the last line is cut off"):
        read_export(exported)


def test_a_file_that_is_not_there_or_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"cannot read .*none: No such file"):
        read_export(tmp_path / "none")
    with pytest.raises(Rejected, match="Is a directory"):
        read_export(tmp_path)
    with pytest.raises(Unavailable, match="the export is not whole"):
        write_export(History((), (), None), tmp_path)


# -- the audit


async def test_an_export_is_audited_as_the_history_is(exported: Path) -> None:
    assert audit_export(exported) == audit_history(read_export(exported))
    assert audit_export(exported).violations == ()


def test_a_long_export_with_faults_is_audited_as_the_history_is(tmp_path: Path) -> None:
    path, written = tmp_path / "history.jsonl", history(600, answers=3)
    write_export(written, path)
    found = audit_export(path)
    assert found == audit_history(written)
    assert (found.violations, found.unchecked, found.log_events) == ((), (), len(written.log))
    assert 0 < found.void_events and found.records + found.reports == len(written.records)


async def test_an_export_is_audited_alike_in_any_order_of_its_streams_and_in_any_spelling(exported: Path) -> None:
    expected = audit_export(exported)
    lines = exported.read_text(encoding="utf-8").splitlines()
    spelled = [json.dumps(dict(sorted(json.loads(line).items()))) + "\n" for line in lines]
    exported.write_text("".join(spelled))
    assert audit_export(exported) == expected
    exported.write_text("".join([spelled[9], *spelled[7:9], *spelled[:7]]))
    assert audit_export(exported) == expected


@pytest.mark.parametrize("at", [2, 8, 9], ids=["in LOG", "in RECORDS", "in place of a batch"])
@pytest.mark.parametrize("line", [line for line, _ in BAD_LINES.values()], ids=BAD_LINES.keys())
async def test_a_bad_line_is_named_alike_by_the_audit(exported: Path, line: bytes, at: int) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    exported.write_bytes(b"".join([*lines[:at], line, *lines[at + 1 :]]))
    with pytest.raises(ContractError) as read:
        read_export(exported)
    with pytest.raises(ContractError) as audited:
        audit_export(exported)
    assert str(audited.value) == str(read.value) and f"line {at + 1}: " in str(read.value)


async def test_the_first_of_two_bad_lines_is_named_though_the_second_is_met_before_it(exported: Path) -> None:
    text = exported.read_text(encoding="utf-8").replace("reef.EngineJoined.v1", "reef.EngineTeleported.v1")
    exported.write_text(text.replace('"score":0.125', '"score":"good"'), encoding="utf-8")
    with pytest.raises(ContractError, match=r"line 4: event 4 .*EngineTeleported"):
        audit_export(exported)


async def test_a_bad_line_behind_a_contradiction_is_not_overlooked(exported: Path) -> None:
    text = exported.read_text(encoding="utf-8").replace('"base":"base","batch"', '"base":"never","batch"')
    exported.write_text(text, encoding="utf-8")
    assert audit_export(exported).violations[0].invariant == "fold"
    exported.write_text(text.replace("reef.JobDropped.v1", "reef.JobForgotten.v1"), encoding="utf-8")
    with pytest.raises(ContractError, match=r"line 7: event 7 .*JobForgotten"):
        audit_export(exported)


async def test_a_line_that_names_two_streams_is_refused(exported: Path) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    lines[7] = lines[7].replace(b'{"stream":"RECORDS",', b'{"stream":"LOG","stream":"RECORDS",')
    exported.write_bytes(b"".join(lines))
    with pytest.raises(ContractError, match="line 8: it names more than one stream"):
        audit_export(exported)


async def test_a_line_that_is_nested_too_deeply_is_named(exported: Path) -> None:
    deep = b'"metadata":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b","
    exported.write_bytes(exported.read_bytes().replace(b'"metadata":{', deep))
    with pytest.raises(ContractError, match=r"line 9: .*recursion"):
        audit_export(exported)


def test_a_file_that_goes_away_is_said_to_be_gone_and_the_collector_works_on(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"cannot read .*gone\.jsonl"):
        audit_export(tmp_path / "gone.jsonl")
    assert gc.isenabled()
