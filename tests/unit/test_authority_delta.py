"""Whoever trains, with deltas: what is kept of a candidate, what is offered of it, and how a later boot reads it.

Knows: the trainer's and an attached loop's hands, a real store, a real tcp door. Must not know: engines, publishers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consumers.reef_trainer.book import RecordBook
from consumers.reef_trainer.role import Trainer
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.attached import Attached
from reef_bus.authority import Authority
from reef_bus.backends import Piece, Pieces, Sample, TrainingBackend
from reef_bus.config import Artifacts, Config, Publication, Training, build, check
from reef_bus.core.effects import Me, OfferWeights, Train
from reef_bus.core.publication import Publication as Open
from reef_bus.core.training import Candidate, Job
from reef_bus.errors import ContractError, Rejected, Unavailable
from reef_bus.events import Blob, CandidateReady, ScenarioRegistered, SenderReady
from reef_bus.journal import MemoryJournal, MemoryStreams
from reef_bus.manifest import Manifest, describe
from reef_bus.samples import Batch, Given, encode_batch
from reef_bus.stored import chain_at, read
from reef_bus.transport import Ticket

SIZE = 3000
BOTH = Config(publication=Publication(mode="staged", delta=True), artifacts=Artifacts(anchor_every=3))
ME = Me("trainer", "t.1")


def weights(number: int) -> Pieces:
    data = bytearray(bytes(range(250)) * (SIZE // 250))
    for later in range(1, number + 1):
        data[later * 7] ^= 0xFF
    return {"w": Piece("U8", (SIZE,), memoryview(bytes(data)))}


class Counting(TrainingBackend):
    """A state is a number; a step adds one. What it loads, it tells from the file's bytes."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.trained = 0

    def initial(self) -> int:
        return 0

    def load(self, weights_: Path, optimizer: Path | None) -> int:
        assert optimizer is not None
        number = int(optimizer.read_text())
        assert weights_.read_bytes().endswith(bytes(weights(number)["w"].data))
        self.loaded.append(number)
        return number

    def train(self, state: int, batch: Sequence[Sample], seed: int) -> tuple[int, dict[str, float]]:
        self.trained += 1
        return state + 1, {}

    def weights(self, state: int) -> Pieces:
        return weights(state)

    def optimizer(self, state: int) -> bytes:
        return str(state).encode()


class Found:
    """A trainer, and the candidates that it has made."""

    def __init__(self, folder: Path, config: Config = BOTH) -> None:
        self.config = msgspec.structs.replace(config, state_dir=str(folder))
        self.store = ArtifactStore(self.config.folder("artifacts"))
        self.candidates: list[Candidate] = []
        self.reboot()

    def reboot(self) -> None:
        self.backend = Counting()
        book = RecordBook(self.config, MemoryJournal(MemoryStreams(clock=lambda: 1)), self.store)
        self.trainer = Trainer(self.config, ME, self.backend, self.store, book)

    def register(self) -> None:
        said = self.trainer.register()
        assert isinstance(said, ScenarioRegistered)
        self.candidates.append(candidate("base", "", said))

    def make(self) -> CandidateReady:
        step = len(self.candidates)
        job = Job(
            id=f"job{step}", step=step, base=self.candidates[-1].id, batch=Blob(digest="0" * 64, size=1), seq=step
        )
        batch = Batch(job=job.id, step=step, base=job.base, seed=0, samples=(), records=(), floor=0, taken=())
        said = self.trainer.train(Train(job, self.candidates[-1]), batch)
        assert isinstance(said, CandidateReady)
        self.candidates.append(candidate(said.candidate, job.base, said))
        return said


def candidate(id_: str, base: str, said: CandidateReady | ScenarioRegistered) -> Candidate:
    return Candidate(
        id=id_,
        base=base,
        step=0,
        weights=said.weights,
        optimizer=said.optimizer,
        manifest=said.manifest,
        tensor_bytes=said.tensor_bytes,
        seq=1,
        delta=said.delta if isinstance(said, CandidateReady) else None,
    )


def test_candidates_are_kept_as_deltas_between_anchors_and_each_is_what_its_manifest_says(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.register()
    made = [found.make() for _ in range(5)]
    lengths = [len(chain.links) if (chain := chain_at(found.store, each.weights.digest)) else 0 for each in made]
    assert lengths == [1, 2, 0, 1, 2]
    for number, each in enumerate(made, 1):
        manifest = describe(weights(number))
        assert (each.manifest, each.tensor_bytes) == (manifest.digest, SIZE)
        assert each.delta and each.delta.size < SIZE and found.store.has(each.delta.digest)
        assert describe(read(found.store, each.weights.digest, manifest)) == manifest


def test_without_the_settings_candidates_are_as_they_were(tmp_path: Path) -> None:
    found = Found(tmp_path, Config())
    found.register()
    made = found.make()
    assert made.delta is None and chain_at(found.store, made.weights.digest) is None


def test_a_trainer_that_trains_in_place_is_not_asked_for_what_it_trained_from(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.register()
    found.backend.mutates_in_place = True
    made = [found.make() for _ in range(2)]
    assert found.backend.loaded == [], "to load the base would undo the step"
    for number, each in enumerate(made, 1):
        assert each.delta and describe(read(found.store, each.weights.digest, describe(weights(number))))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("lost", range(1, 5))
def test_a_store_that_does_not_answer_is_asked_again_and_nothing_is_trained_again_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool, lost: int
) -> None:
    """Delta, manifest, chain, optimizer state: whichever is not taken at first."""
    found, calls = Found(tmp_path), 0
    found.register()
    found.backend.mutates_in_place = in_place
    write = ArtifactStore.put_parts

    def failing(store: ArtifactStore, parts: Any) -> Blob:
        nonlocal calls
        calls += 1
        if calls == lost:
            raise Unavailable("the server gives no answer")
        return write(store, parts)

    monkeypatch.setattr(ArtifactStore, "put_parts", failing)
    with pytest.raises(Unavailable):
        found.make()
    found.make()
    assert found.backend.trained == 1 and found.backend.loaded == []
    assert found.candidates[1].manifest == describe(weights(1)).digest
    found.make()
    assert found.backend.trained == 2 and found.candidates[2].manifest == describe(weights(2)).digest


def test_a_later_boot_trains_on_from_a_candidate_that_is_kept_as_a_chain(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.register()
    found.make(), found.make()
    found.reboot()
    made = found.make()
    assert found.backend.loaded == [2] and made.manifest == describe(weights(3)).digest
    assert list(found.config.folder("scratch").iterdir()) == []


def test_a_base_that_cannot_be_read_halts_and_names_the_blob(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.register()
    made = found.make()
    assert made.delta is not None
    found.store.path(made.delta.digest).unlink()
    found.reboot()
    with pytest.raises(ContractError, match=made.delta.digest):
        found.make()


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_nobody_trains_on_from_a_base_whose_bytes_are_others(tmp_path: Path, part: str) -> None:
    """Bytes that a backend would read without complaint: an earlier candidate's, in the place of the base's."""
    found = Found(tmp_path, Config())
    found.register()
    found.make()
    base, last = (getattr(each, part) for each in found.candidates)
    path = found.store.path(last.digest)
    path.unlink()
    path.write_bytes(found.store.path(base.digest).read_bytes())
    found.reboot()
    with pytest.raises(ContractError, match=f"{last.digest} is damaged"):
        found.make()
    assert found.backend.loaded == []


class Attachment:
    """An attached loop whose job 1 was handed in, and is open: its weights are version 1, its base version 0."""

    def __init__(self, folder: Path) -> None:
        config = msgspec.structs.replace(BOTH, training=Training(backend="attached"), state_dir=str(folder))
        self.store = ArtifactStore(config.folder("artifacts"))
        self.role = Attached(config, ME, self.store)
        before, first = save_weights(self.store, weights(0))
        self.blob, manifest = save_weights(self.store, weights(1))
        self.base = Candidate(
            id="base", base="", step=0, weights=before, optimizer=None, manifest=first.digest, tensor_bytes=SIZE, seq=1
        )
        batch = Batch(
            job="j",
            step=1,
            base="base",
            seed=0,
            samples=(),
            records=(),
            floor=0,
            taken=(),
            given=Given(weights=self.blob, manifest=manifest.digest),
        )
        self.job = Job(id="j", step=1, base="base", batch=self.store.put(encode_batch(batch)), seq=2)

    def make(self) -> CandidateReady:
        said = self.role._train(Train(self.job, self.base))
        assert isinstance(said, CandidateReady)
        return said


def test_what_an_attached_loop_made_stays_in_full_and_is_told_from_its_base(tmp_path: Path) -> None:
    found = Attachment(tmp_path)
    said = found.make()
    assert said.weights == found.blob and said.delta and said.delta.size < SIZE


def test_what_an_attached_loop_made_and_is_damaged_since_halts_and_ends_no_boot(tmp_path: Path) -> None:
    """A boot that ends is started again, and ends again; what halts waits for a person, and says for what."""
    found = Attachment(tmp_path)
    path = found.store.path(found.blob.digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ContractError, match=f"the weights of job j cannot be read: .*{found.blob.digest}"):
        found.make()


def exhausted(*_: object, **__: object) -> Any:
    raise MemoryError


def test_no_memory_for_a_delta_is_no_reason_to_have_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, attached = Found(tmp_path / "trainer"), Attachment(tmp_path / "attached")
    found.register()
    for place in ("reef_bus.delta.encode", "reef_bus.stored._room", "reef_bus.authority.read"):
        with monkeypatch.context() as patch:
            patch.setattr(place, exhausted)
            said = attached.make()
            assert said.weights == attached.blob and said.delta is None
            if place != "reef_bus.authority.read":
                made = found.make()
                assert made.delta is None and chain_at(found.store, made.weights.digest) is None
    assert found.make().delta is not None


# -- the offer


async def offer(found: Authority, of: Candidate, stack: contextlib.AsyncExitStack, attempt: int = 1) -> SenderReady:
    target: Any = msgspec.structs.replace(_open(of), attempt=attempt)
    said = await found._offer(OfferWeights(target, of), stack)
    assert isinstance(said, SenderReady), said
    return said


def _open(of: Candidate) -> Open:
    values: dict[str, Any] = dict.fromkeys(Open.__struct_fields__, "")
    known = {"id": "p", "attempt": 1, "load_id": "inc:1", "manifest": of.manifest, "transport": "tcp"}
    return Open(**{**values, **known})


async def asked(found: Found, said: SenderReady, base: str) -> Any:
    manifest = Manifest.decode(found.store.get(said.manifest))
    ticket = Ticket("tcp", said.address, said.token)
    usual: dict[str, Any] = {"publication": "p", "attempt": said.attempt, "stall_s": 1.0}
    return await found.trainer.transports["tcp"].delta(ticket, manifest, base, **usual)


async def test_a_candidate_is_offered_with_the_delta_from_its_base(tmp_path: Path) -> None:
    found = Found(tmp_path)
    found.register()
    made = found.make()
    async with contextlib.AsyncExitStack() as stack:
        said = await offer(found.trainer, found.candidates[-1], stack)
        delta = await asked(found, said, describe(weights(0)).digest)
        assert made.delta and delta == found.store.get(made.delta.digest)
        assert await asked(found, said, made.manifest) is None


@pytest.mark.parametrize("why", ["a later attempt", "not configured", "damaged", "gone", "no delta"])
async def test_an_offer_without_a_delta_is_an_offer_all_the_same(tmp_path: Path, why: str) -> None:
    found = Found(tmp_path)
    found.register()
    made = found.make()
    assert made.delta is not None
    path, of = found.store.path(made.delta.digest), found.candidates[-1]
    if why == "not configured":
        found.trainer.config = Config(artifacts=Artifacts(anchor_every=3))
    if why == "damaged":
        path.chmod(0o644)
        path.write_bytes(b"no delta at all")
    if why == "gone":
        path.unlink()
    if why == "no delta":
        of = msgspec.structs.replace(of, delta=None)
    async with contextlib.AsyncExitStack() as stack:
        said = await offer(found.trainer, of, stack, attempt=2 if why == "a later attempt" else 1)
        assert await asked(found, said, describe(weights(0)).digest) is None


# -- the configuration


def test_deltas_are_off_unless_asked_for() -> None:
    assert not Config().tells_deltas() and (Config().publication.delta, Config().artifacts.anchor_every) == (False, 1)
    text = {"publication": {"delta": True, "mode": "staged"}, "artifacts": {"anchor-every": 8}}
    assert build("here", text).tells_deltas()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"publication": {"delta": True}}, "publication.delta needs publication.mode staged"),
        ({"artifacts": {"anchor-every": 0}}, "artifacts.anchor-every is 0: expected 1 .all in full. or more"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(text: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        build("here", text)


def test_without_the_extra_deltas_are_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reef_bus.config._installed", lambda module: module != "numpy")
    assert check(Config()) == Config()
    with pytest.raises(Rejected, match=r"pip install 'reef-bus\[delta\]'"):
        check(Config(artifacts=Artifacts(anchor_every=2)))
