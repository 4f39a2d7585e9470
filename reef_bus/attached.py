"""The trainer that trains nothing: its candidates come from a training loop of somebody's own, ready-made.

Knows: what the loop has handed in, and what the log says became of it. Must not know: threads, or how anything is
trained.
What is handed in is durable before its job is dispatched, and the job's batch names it: so every later boot can finish
the job, and a step that was handed in before is found on the log by its content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.authority import Authority
from reef_bus.backends import Pieces
from reef_bus.config import Config
from reef_bus.core.effects import AssembleBatch, Debt, Me, Register, Train
from reef_bus.core.ids import BASE, derived
from reef_bus.core.training import Candidate
from reef_bus.core.world import World
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Blob, Event, JobDispatched, JobDropped, Recorded
from reef_bus.manifest import Manifest, finite, layout_differences
from reef_bus.outcomes import Endings, Outcome, Refused, note, outcome
from reef_bus.runner import blocking
from reef_bus.samples import Batch, Given, decode_batch, encode_batch
from reef_bus.stored import read

KEPT_COPIES = 2  # of weights: what is published, and what comes next; beyond, they are read from the store


class Head(NamedTuple):
    """What is committed and may serve."""

    load_id: str
    candidate: str
    step: int


class Place(NamedTuple):
    """Where the log is: the last step that was selected (-1: nothing is registered), and the head."""

    step: int = -1
    head: Head | None = None


class Publish:
    """One step that was handed in. `job` is its job, as soon as that may be on the log; `candidate` once it is."""

    def __init__(self, step: int, weights: Blob, manifest: Manifest) -> None:
        self.step = step
        self.weights = weights
        self.manifest = manifest
        self.digest = manifest.digest
        self.job = self.candidate = ""
        self.told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def job_from(self, base: str) -> str:
        return derived("job", self.step, base, self.digest)


class Attached(Authority):
    """One boot of a trainer whose loop is somebody else's."""

    def __init__(self, config: Config, me: Me, store: ArtifactStore) -> None:
        super().__init__(config, me, store)
        self.world = World()
        self.place = Place()
        self.endings = Endings()
        self.candidates: dict[tuple[int, str], str] = {}  # the first of each step and manifest digest
        self.dispatched: dict[int, list[tuple[str, str]]] = {}  # by step: every job of this log, and its base
        self._indexed = 0
        self.handed: list[Publish] = []  # in the order in which they came, until their outcome is known
        self.copies: dict[str, Pieces] = {}  # by manifest digest
        self.moved = asyncio.Event()  # set, and replaced, when the log or what was handed in has moved
        self._order = asyncio.Lock()

    # -- what the log says

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.world = world
        for recorded in batch:
            note(self.endings, recorded.event)
            if isinstance(recorded.event, JobDispatched):
                job = recorded.event
                self.dispatched.setdefault(job.step, []).append((job.job, job.base))
        self._index()
        self.place = self._place()
        self._tell()

    def _index(self) -> None:
        """Candidates that are new: they are never taken away again, and a log may have many."""
        known = self.world.training.candidates
        new = [*islice(reversed(known.values()), len(known) - self._indexed)]
        self._indexed = len(known)
        for candidate in reversed(new):
            self.candidates.setdefault((candidate.step, candidate.manifest), candidate.id)

    def _place(self) -> Place:
        training, head = self.world.training, self.world.publications.head
        if head is None:
            return Place()
        last = training.selected[-1] if training.selected else BASE
        shown = Head(head.load_id, head.candidate, training.candidates[head.candidate].step)
        return Place(training.candidates[last].step, shown)

    def _tell(self) -> None:
        for publish in list(self.handed):
            found = self._outcome(publish)
            if found is not None:
                self.handed.remove(publish)
                self.copies.pop(publish.digest, None)
                publish.told.set_result(found)
        self.moved.set()
        self.moved = asyncio.Event()

    def _outcome(self, publish: Publish) -> Outcome | None:
        if self._on_log(publish) and publish.candidate:
            return outcome(self.world, self.endings, publish.candidate)
        return Refused(publish.step, "", *self.endings.causes[publish.job]) if self._given_up(publish) else None

    def _on_log(self, publish: Publish) -> bool:
        """Its candidate is there, or its job is open."""
        training = self.world.training
        if not publish.candidate:
            publish.candidate = self.candidates.get((publish.step, publish.digest), "")
        return bool(publish.candidate) or (
            training.job is not None and training.job.id == publish.job_from(training.job.base)
        )

    def _given_up(self, publish: Publish) -> bool:
        """A person discarded its job before there was a candidate."""
        return publish.job in self.endings.causes and not self._on_log(publish)

    def settled(self) -> bool:
        """This boot is the authority, and what an earlier one left open is decided, unless a person is to do that."""
        job = self.world.training.job
        held = self.config.training.hold and job is not None and job.evaluated > 0
        return self.world.training.boot == self.me.boot and (job is None or held)

    # -- what the loop hands in

    async def hand_in(self, step: int, pieces: Pieces) -> Publish:
        """Make one step durable and have it published; `pieces` must not change any more. A step that is on the log
        with this content is not published again. Raises Rejected for one that does not go on from the log."""
        async with self._order:
            await self._check_layout(step, pieces)
            publish = Publish(step, *await blocking(self._save, step, pieces))
            if same := next((p for p in self.handed if (p.step, p.digest) == (step, publish.digest)), None):
                return same
            publish.job = self._job_before(publish)
            if not publish.job and not self._on_log(publish):
                self._check_step(publish)
            self._keep(publish, pieces)
        return publish

    async def _check_layout(self, step: int, pieces: Pieces) -> None:
        base = self.world.training.candidates.get(BASE)
        layouts = {name: (piece.dtype, piece.shape, piece.data.nbytes) for name, piece in pieces.items()}
        if base is not None:
            registered = Manifest.decode(await blocking(self.store.get, base.manifest))
        elif self.handed:
            registered = self.handed[0].manifest
        elif step:
            raise Rejected(f"step {step}: nothing is registered yet; publish the model as it starts first, as step 0")
        else:
            return
        if said := layout_differences(registered, layouts):
            raise Rejected(f"step {step} is not of the model that was registered: {'; '.join(said[:3])}")

    def _save(self, step: int, pieces: Pieces) -> tuple[Blob, Manifest]:
        wrong = next((name for name, piece in pieces.items() if not finite(piece)), None)
        if wrong is not None:
            raise Rejected(f"step {step}: tensor {wrong!r} holds an infinity or a NaN: it must not be published")
        return save_weights(self.store, pieces)

    def _job_before(self, publish: Publish) -> str:
        """The job that this step has, or had, on the log; an empty string if there is no candidate of it to be found
        by, and never was one."""
        job, jobs = self.world.training.job, self.dispatched.get(publish.step, [])
        its = [id_ for id_, base in jobs if id_ == publish.job_from(base)]
        return next((id_ for id_ in its if id_ in self.endings.causes or (job is not None and job.id == id_)), "")

    def _check_step(self, publish: Publish) -> None:
        """Steps grow: what was published, or will be, is never published as something else."""
        job, step = self.world.training.job, publish.step
        steps = [self.place.step, *(p.step for p in self.handed), *([job.step] if job else [])]
        if step <= max(steps):
            known = step in steps or any(c.step == step and c.selected for c in self.world.training.candidates.values())
            what = "was published with other content" if known else f"comes before step {max(steps)}"
            raise Rejected(
                f"step {step} {what}; found manifest {publish.digest}. Go on from step {max(steps)}, "
                "from a checkpoint of the same run if there is one"
            )

    def _keep(self, publish: Publish, pieces: Pieces) -> None:
        self.handed.append(publish)
        if len(self.copies) < KEPT_COPIES:
            self.copies[publish.digest] = pieces
        self._tell()

    def next(self) -> Publish | None:
        """The next step to register or to dispatch."""
        return next((p for p in self.handed if not self._on_log(p) and not self._given_up(p)), None)

    # -- debts

    def react(self, world: World, now: int) -> Sequence[Debt]:
        """What waits for the loop is not owed before the loop has handed something in."""
        debts = super().react(world, now)
        return debts if self.next() else [d for d in debts if not isinstance(d.effect, Register | AssembleBatch)]

    def register(self) -> Event:
        publish = self._due()
        manifest = Manifest.decode(self.store.get(publish.digest))
        return self.registered(self.config.training.backend, publish.weights, manifest)

    async def assemble(self, effect: AssembleBatch) -> Event:
        """A batch of no records. What was consumed before stays consumed: its commit context goes on."""
        publish = self._due()
        (base,) = effect.bases  # whole models: there is one chain
        publish.job = publish.job_from(base)
        blob = effect.batches.get("")
        last = decode_batch(await blocking(self.store.get, blob.digest)) if blob else None
        batch = Batch(
            job=publish.job,
            step=publish.step,
            base=base,
            seed=0,
            samples=(),
            records=(),
            floor=last.floor if last else 0,
            taken=last.taken if last else (),
            given=Given(weights=publish.weights, manifest=publish.digest),
        )
        return JobDispatched(
            scenario=self.config.scenario,
            job=batch.job,
            step=batch.step,
            base=batch.base,
            batch=await blocking(self.store.put, encode_batch(batch)),
            records=0,
        )

    def _due(self) -> Publish:
        publish = self.next()
        if publish is None:
            raise Unavailable("what was handed in is on the log already")  # so this debt is about to be gone
        return publish

    def train(self, effect: Train, batch: Batch) -> Event:
        """A job of a trainer that did train: nobody here can, and its records stay consumed."""
        detail = f"the trainer is attached: nobody trains on the {len(batch.records)} records of this job"
        return JobDropped(scenario=self.config.scenario, job=effect.job.id, reason="attached", detail=detail)

    def weights(self, candidate: Candidate) -> Pieces:
        copy = self.copies.get(candidate.manifest)
        if copy is not None:
            return copy
        manifest = Manifest.decode(self.store.get(candidate.manifest))
        return read(self.store, candidate.weights.digest, manifest)
