"""A state folder with a history whose blobs are real, written as the roles would have written it.

Knows: facts, blobs, a server of its own. Must not know: what is done with the history.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Sample
from reef_bus.config import Artifacts, Config, Nats, dump
from reef_bus.embedded import NatsServer
from reef_bus.events import Draft, Event, InferenceRecorded, JobDispatched, ReportReceived
from reef_bus.jetstream import JetStreamJournal, connect
from reef_bus.samples import Batch, TokenRow, encode_batch, encode_rows
from tests.facts import E0, E1, SERVING, L, S, released, trained
from tests.spec import Said, Step

HISTORY: tuple[Step, ...] = (*SERVING, *trained("c1"), *released(1, "c1", E0, E1))
"""19 events: 7 until both engines serve release 0, 5 of a job, 7 of the release that came of it."""

ROW = TokenRow(prompt=(11, 7, 10), answer=(7,), logprobs=(-0.25,), load_ids=(L(0),))
SAMPLE = Sample(
    record="r1", group="g", prompt=ROW.prompt, completion=ROW.answer, logprobs=ROW.logprobs, load_id=L(0), reward=1.0
)


def batch(job: str, base: str, step: int, record: tuple[str, int], floor: int) -> bytes:
    """What a job's batch says: which record it consumes."""
    sample = replace(SAMPLE, record=record[0], load_id=L(record[1] // 3))  # r1 is release 0's answer, r2 release 1's
    return encode_batch(
        Batch(job=job, step=step, base=base, seed=1, samples=(sample,), records=(record,), floor=floor, taken=())
    )


def real(store: ArtifactStore, event: Event) -> Event:
    """The event, naming blobs that are there instead of made-up digests."""

    def put(match: re.Match[str]) -> str:
        return store.put(match[0].encode()).digest

    if isinstance(event, JobDispatched):
        consumed = (("r1", 1), 1) if event.job == "job-c1" else (("r2", 3), 3)
        return replace(event, batch=store.put(batch(event.job, event.base, event.step, *consumed)), records=1)
    text = re.sub(r"(sha|digest)-of-[\w-]+", put, msgspec.json.encode(event).decode())
    return msgspec.json.decode(text, type=type(event))


def digest(name: str) -> str:
    """The digest of what `real` stores for that made-up one."""
    return hashlib.sha256(name.encode()).hexdigest()


async def write(journal: JetStreamJournal, store: ArtifactStore, steps: Sequence[Step]) -> None:
    """Append as the writers would: chained, by the boots that tests/facts.py has in mind."""
    tails: dict[str, int] = {}
    for step in steps:
        event = real(store, step.event if isinstance(step, Said) else step)
        boot = {"train": "t1", "release": "p1", "engine": f"{event.key}.1"}.get(event.family, "s1")
        draft = Draft(event=_proven(event), writer=f"{event.family}/x", boot=boot)
        tails[event.chain] = (await journal.append(draft, tails.get(event.chain, 0))).seq


def _proven(event: Event) -> Event:
    """A commit quotes where its proofs are: in HISTORY at 17 and 18."""
    evidence = getattr(event, "evidence", ())
    quoted = tuple(replace(each, seq=seq) for each, seq in zip(evidence, (17, 18), strict=False))
    return replace(event, evidence=quoted) if evidence else event


async def answer(journal: JetStreamJournal, store: ArtifactStore, record: str, load_id: str, as_of: int) -> None:
    """An answer and its report on RECORDS."""
    event = InferenceRecorded(
        scenario=S,
        record=record,
        engine="e0",
        boot="e0.1",
        load_id=load_id,
        as_of=as_of,
        done_as_of=as_of,
        prompt="7",
        answer="7",
        prompt_tokens=3,
        answer_tokens=1,
        temperature=1.0,
        blob=store.put(encode_rows([ROW])),
        row=0,
        tags={"group": "g"},
    )
    report = ReportReceived(scenario=S, report=f"f-{record}", references=(record,), score=1.0, feedback="", metadata={})
    for each in (event, report):
        await journal.append(Draft(event=each, writer="gateway/g", boot="g1"), 0)


def with_server(
    state: Path, what: Callable[[JetStreamJournal, ArtifactStore], Awaitable[Any]], artifacts: str = ""
) -> Any:
    """Run something against the state folder's own server, which is stopped again."""
    server = NatsServer(state / "nats")

    async def run() -> Any:
        journal = await connect(server.url, "reef", "test")
        try:
            return await what(journal, ArtifactStore(artifacts or state / "artifacts"))
        finally:
            await journal.close()

    try:
        server.start()
        (state / "run").mkdir(exist_ok=True)
        config = Config(state_dir=str(state), artifacts=Artifacts(at=artifacts), nats=Nats(url=server.url))
        (state / "run" / "deployment.json").write_bytes(dump(config))
        return asyncio.run(run())
    finally:
        server.stop()


def deployment(state: Path, steps: Sequence[Step] = HISTORY, artifacts: str = "") -> Path:
    """A deployment that is down: `steps` on its log; r1, which its job consumed, and r2, which waits, on RECORDS."""

    async def make(journal: JetStreamJournal, store: ArtifactStore) -> None:
        await journal.apply(1)
        await answer(journal, store, "r1", L(0), 7)
        await write(journal, store, steps)
        await answer(journal, store, "r2", L(1), 19)

    with_server(state, make, artifacts)
    return state
