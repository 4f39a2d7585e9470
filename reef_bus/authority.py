"""A boot that writes the `train` family: what all such boots do alike, whatever makes their candidates.

Knows: the artifact store, the transports, how a candidate is decided on. Must not know: engines, publications' fate, or
when to do what: `core/reactions` says what is owed.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Pieces
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
from reef_bus.core.ids import derived
from reef_bus.core.training import Candidate, Job
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError
from reef_bus.events import (
    Blob,
    CandidateEvaluated,
    CandidateReady,
    CandidateRejected,
    CandidateSelected,
    Event,
    ScenarioRegistered,
    SenderFailed,
    SenderReady,
    TrainerJoined,
)
from reef_bus.manifest import Manifest
from reef_bus.recipe import Evaluator, HoldForReview, SelectFinite, Selector, TrainingMetrics
from reef_bus.runner import Role, blocking
from reef_bus.samples import Batch, decode_batch
from reef_bus.transport import Transport, transports


class Authority(Role):
    """One boot of whoever trains."""

    name = "trainer"

    def __init__(self, config: Config, me: Me, store: ArtifactStore) -> None:
        super().__init__(me)
        self.config = config
        self.store = store
        self.transports: dict[str, Transport] = transports(
            store,
            config.training.host,
            config.publication.deadlines.stall_s,
            config.training.offers,
            config.publication.torch_device,
        )
        self.evaluator: Evaluator = TrainingMetrics()
        self.selector: Selector = HoldForReview() if config.training.hold else SelectFinite()

    @abstractmethod
    def register(self) -> Event:
        """Make the base model durable; ends in `registered`. Blocks."""

    @abstractmethod
    async def assemble(self, effect: AssembleBatch) -> Event:
        """Wait for what the next job is about and make it durable; ends in `JobDispatched`."""

    @abstractmethod
    def train(self, effect: Train, batch: Batch) -> Event:
        """Make the job's candidate durable; ends in `ready` or `JobDropped`. Blocks."""

    @abstractmethod
    def weights(self, candidate: Candidate) -> Pieces:
        """The candidate's tensors, which nobody writes to. Blocks."""

    def in_place(self) -> bool:
        """Whether a step changes the incumbent that it starts from."""
        return False

    def react(self, world: World, now: int) -> Sequence[Debt]:
        return reactions.trainer(world, self.me)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case Join():
                return self._join()
            case Register():
                return await blocking(self.register)
            case AssembleBatch() as effect:
                return await self.assemble(effect)
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
            mutates_in_place=self.in_place(),
        )

    # -- candidates

    def registered(self, recipe: str, weights: Blob, manifest: Manifest, optimizer: Blob | None = None) -> Event:
        return ScenarioRegistered(
            scenario=self.config.scenario,
            model=self.config.model,
            recipe=recipe,
            weights=weights,
            optimizer=optimizer,
            manifest=manifest.digest,
            tensor_bytes=manifest.total,
        )

    def _train(self, effect: Train) -> Event:
        """What was made before its job was dispatched needs nobody who can make it."""
        batch = decode_batch(self.store.get(effect.job.batch.digest))
        if batch.given is None:
            return self.train(effect, batch)
        if not self.store.has(batch.given.weights.digest):
            raise ContractError(f"the weights of job {batch.job}, {batch.given.weights.digest}, are not in the store")
        manifest = Manifest.decode(self.store.get(batch.given.manifest))
        return self.ready(effect.job, batch.given.weights, manifest)

    def ready(
        self,
        job: Job,
        weights: Blob,
        manifest: Manifest,
        optimizer: Blob | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Event:
        """The job's candidate, every part of which is durable."""
        return CandidateReady(
            scenario=self.config.scenario,
            job=job.id,
            attempt=job.attempt,
            candidate=derived("cand", job.id),
            base=job.base,
            weights=weights,
            optimizer=optimizer,
            manifest=manifest.digest,
            tensor_bytes=manifest.total,
            metrics=dict(metrics or {}),
        )

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
            source = await blocking(self.weights, effect.candidate)
            transport = self.transports[target.transport]
            offer = await transport.offer(manifest, source, publication=target.id, attempt=target.attempt)
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
