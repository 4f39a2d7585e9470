"""The trainer: eligible batch → job → candidate → decision, and the sender of what publishers have targeted.

Knows: its backend, the artifact store, the transports. Must not know: engines, publications' fate, or when to do what:
`core/reactions.py` says what is owed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from consumers.reef_trainer.book import RecordBook
from reef_bus import process
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.backends import TrainingBackend
from reef_bus.config import Config
from reef_bus.core import reactions
from reef_bus.core.effects import (
    AssembleBatch,
    Debt,
    Decide,
    Evaluate,
    Join,
    Me,
    OfferWeights,
    Register,
    Train,
)
from reef_bus.core.ids import BASE, derived
from reef_bus.core.training import Candidate
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError
from reef_bus.events import (
    Blob,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    Event,
    JobDispatched,
    JobDropped,
    Recorded,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TrainerJoined,
)
from reef_bus.journal import Journal
from reef_bus.manifest import Manifest
from reef_bus.recipe import Evaluator, HoldForReview, SelectFinite, Selector, TrainingMetrics
from reef_bus.runner import Role, blocking
from reef_bus.samples import Batch, decode_batch, encode_batch
from reef_bus.transport import Transport, transports

KEPT_STATES = 3  # the head, the candidate being published, and the one being trained


class Trainer(Role):
    """One boot of the trainer."""

    name = "trainer"

    def __init__(
        self, config: Config, me: Me, backend: TrainingBackend, store: ArtifactStore, book: RecordBook
    ) -> None:
        super().__init__(me)
        self.config = config
        self.backend = backend
        self.store = store
        self.book = book
        self.transports: dict[str, Transport] = transports(
            store, config.training.host, config.publication.deadlines.stall_s
        )
        self.evaluator: Evaluator = TrainingMetrics()
        self.selector: Selector = HoldForReview() if config.training.hold else SelectFinite()
        self._states: dict[str, Any] = {}
        self._kept = threading.Lock()  # an offer loads in one thread while a job trains in another

    def react(self, world: World, now: int) -> Sequence[Debt]:
        debts = reactions.trainer(world, self.me)
        if 0 < self.config.training.max_jobs <= world.training.dispatched:
            return [debt for debt in debts if not isinstance(debt.effect, AssembleBatch)]
        return debts

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.book.moved(world)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case Join():
                return self._join()
            case Register():
                return await blocking(self._register)
            case AssembleBatch() as effect:
                return await self._assemble(effect)
            case Train() as effect:
                return await blocking(self._train, effect)
            case Evaluate() as effect:
                return await blocking(self._evaluate, effect)
            case Decide() as effect:
                return self._decide(effect)
            case OfferWeights() as effect:
                return await self._offer(effect, scope)
        raise AssertionError(debt.effect)

    def _join(self) -> Event:
        return TrainerJoined(
            scenario=self.config.scenario,
            backend=self.config.training.backend,
            offers=self.config.training.offers,
            mutates_in_place=self.backend.mutates_in_place,
        )

    def _register(self) -> Event:
        state = self._remember(BASE, self.backend.initial())
        weights, manifest, optimizer = self._save(state)
        return ScenarioRegistered(
            scenario=self.config.scenario,
            model=self.config.model,
            recipe="grpo",
            weights=weights,
            optimizer=optimizer,
            manifest=manifest.digest,
            tensor_bytes=manifest.total,
        )

    # -- jobs

    async def _assemble(self, effect: AssembleBatch) -> Event:
        last = decode_batch(await blocking(self.store.get, effect.last_batch.digest)) if effect.last_batch else None
        units, samples, floor, taken = await self.book.batch(effect.base, last)
        job = derived("job", effect.step, effect.base, *(unit.record for unit in units))
        batch = Batch(
            job=job,
            step=effect.step,
            base=effect.base,
            seed=self.config.training.seed + effect.step,
            samples=tuple(samples),
            records=tuple((unit.record, unit.seq) for unit in units),
            floor=floor,
            taken=taken,
        )
        blob: Blob = await blocking(self.store.put, encode_batch(batch))
        return JobDispatched(
            scenario=self.config.scenario,
            job=job,
            step=effect.step,
            base=effect.base,
            batch=blob,
            records=len(units),
        )

    def _train(self, effect: Train) -> Event:
        job = effect.job
        batch = decode_batch(self.store.get(job.batch.digest))
        base = self._state(effect.base)  # a damaged one is not the batch's fault: that halts, and drops nothing
        if self.backend.mutates_in_place:
            self._forget()  # whatever comes of the step: what was kept under a candidate's name is that no more
        try:
            state, metrics = self.backend.train(base, batch.samples, batch.seed)
        except ContractError as error:
            return JobDropped(scenario=self.config.scenario, job=job.id, reason="not_trainable", detail=str(error))
        candidate = derived("cand", job.id)
        weights, manifest, optimizer = self._save(self._remember(candidate, state))
        return CandidateReady(
            scenario=self.config.scenario,
            job=job.id,
            attempt=job.attempt,
            candidate=candidate,
            base=job.base,
            weights=weights,
            optimizer=optimizer,
            manifest=manifest.digest,
            tensor_bytes=manifest.total,
            metrics=metrics,
        )

    def _save(self, state: Any) -> tuple[Blob, Manifest, Blob]:
        """Make a state durable; the manifest is read back, so that what is named on the log is what can be loaded."""
        weights, manifest = save_weights(self.store, self.backend.weights(state))
        optimizer = self.store.put(self.backend.optimizer(state))
        return weights, Manifest.decode(self.store.get(manifest.digest)), optimizer

    def _state(self, candidate: Candidate) -> Any:
        with self._kept:
            found = self._states.get(candidate.id)
        if found is None:
            optimizer = self.store.path(candidate.optimizer.digest) if candidate.optimizer else None
            found = self.backend.load(self.store.path(candidate.weights.digest), optimizer)
        return self._remember(candidate.id, found)

    def _remember(self, candidate: str, state: Any) -> Any:
        with self._kept:
            self._states.pop(candidate, None)
            self._states[candidate] = state
            while len(self._states) > KEPT_STATES:
                del self._states[next(iter(self._states))]
        return state

    def _forget(self) -> None:
        with self._kept:
            self._states.clear()

    def _evaluate(self, effect: Evaluate) -> Event:
        found = self.evaluator.evaluate(effect.candidate, effect.metrics)
        return CandidateEvaluated(
            scenario=self.config.scenario, candidate=effect.candidate.id, evaluator=self.evaluator.name, metrics=found
        )

    def _decide(self, effect: Decide) -> Event | None:
        decision = self.selector.decide(effect.candidate, effect.metrics)
        if decision.select is None:
            return None
        kind = CandidateSelected if decision.select else CandidateRejected
        return kind(
            scenario=self.config.scenario,
            candidate=effect.candidate.id,
            selector=self.selector.name,
            why=decision.why,
        )

    # -- sending

    async def _offer(self, effect: OfferWeights, scope: contextlib.AsyncExitStack) -> Event:
        target = effect.publication
        try:
            manifest = Manifest.decode(await blocking(self.store.get, target.manifest))
            state = await blocking(self._state, effect.candidate)
            transport = self.transports[target.transport]
            offer = await transport.offer(
                manifest, self.backend.weights(state), publication=target.id, attempt=target.attempt
            )
            scope.push_async_callback(offer.close)
        except (TransferError, ContractError) as error:
            return SenderFailed(
                scenario=self.config.scenario,
                publication=target.id,
                attempt=target.attempt,
                cause=error.cause if isinstance(error, TransferError) else "artifact",
                detail=str(error),
            )
        return SenderReady(
            scenario=self.config.scenario,
            publication=target.id,
            attempt=target.attempt,
            load_id=target.load_id,
            manifest=manifest.digest,
            transport=offer.ticket.transport,
            address=offer.ticket.address,
            token=offer.ticket.token,
        )


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    backend: TrainingBackend = await blocking(_backend, config)
    store = ArtifactStore(config.folder("artifacts"))
    book = RecordBook(config, journal, store)
    await book.start(stack)
    return Trainer(config, me, backend, store, book)


def _backend(config: Config) -> TrainingBackend:
    from consumers.reef_trainer.torch_backend import Hyper, TorchTrainer

    training = config.training
    hyper = Hyper(lr=training.lr, minibatches=training.minibatches, seed=training.seed)
    return TorchTrainer(hyper=hyper)


def run(config: Config, id_: str) -> int:
    """Run the trainer in this process; returns its exit status."""
    return process.run(id_, config, _build)
