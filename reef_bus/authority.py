"""A boot that writes the `train` family: what all such boots do alike, whatever makes their candidates.

Knows: the artifact store, the transports, how a candidate is decided on. Must not know: engines, publications' fate, or
when to do what: `core/reactions` says what is owed.
"""

from __future__ import annotations

import contextlib
import logging
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
    RegisterAdapter,
    Train,
)
from reef_bus.core.ids import derived
from reef_bus.core.training import Candidate, Job
from reef_bus.core.world import World
from reef_bus.errors import ContractError, TransferError, Unavailable
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
from reef_bus.samples import Batch, Given, decode_batch
from reef_bus.stored import Base, Saved, longer, read
from reef_bus.transport import Delta, Offer, Transport, transports

log = logging.getLogger(__name__)


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

    def register_adapter(self, effect: RegisterAdapter) -> Event:
        """Make the adapter that changes nothing durable; ends in `AdapterRegistered`. Blocks."""
        raise ContractError(f"{type(self).__name__} trains whole models only; take adapters.scenarios out")

    @abstractmethod
    async def assemble(self, effect: AssembleBatch) -> Event:
        """Wait for what the next job is about and make it durable; ends in `JobDispatched`."""

    @abstractmethod
    def train(self, effect: Train, batch: Batch) -> Event:
        """Make the job's candidate durable; ends in `ready` or `JobDropped`. Blocks."""

    @abstractmethod
    def weights(self, candidate: Candidate) -> Pieces:
        """The candidate's tensors, which nobody writes to. Blocks."""

    def scenario(self, candidate: Candidate) -> str:
        """Whose candidate it is."""
        return candidate.scenario or self.config.scenario

    def in_place(self) -> bool:
        """Whether a step changes the incumbent that it starts from."""
        return False

    def react(self, world: World, now: int) -> Sequence[Debt]:
        scenarios, colocate = self.config.adapters.scenarios, self.config.training.colocate
        return reactions.trainer(world, self.me, scenarios, colocate=colocate)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        match debt.effect:
            case Join():
                return self._join()
            case Register():
                return await blocking(self.register)
            case RegisterAdapter() as effect:
                return await blocking(self.register_adapter, effect)
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
        try:
            return self.ready(effect.job, self._given(batch.given, manifest, effect.base))
        except TransferError as error:
            raise ContractError(f"the weights of job {batch.job} cannot be read: {error}") from error

    def _given(self, given: Given, manifest: Manifest, base: Candidate) -> Saved:
        """It is kept in full already; that it may be told from its base is all that is left to do. Raises TransferError
        where other bytes lie there."""
        saved = Saved(given.weights, manifest)
        if not self.config.publication.delta:
            return saved
        try:
            chain = longer(self.store, read(self.store, given.weights.digest, manifest), manifest, self.base(base))
        except MemoryError as error:
            log.warning("there is no room to tell %s from its base: %r", given.manifest, error)
            return saved
        return saved._replace(delta=chain.links[-1].delta) if chain else saved

    def base(self, candidate: Candidate) -> Base | None:
        """A candidate as what another one is told from; None where it cannot be read, which is no reason to halt. Who
        trains in place is not asked for it: to load it would undo the step."""
        try:
            manifest = Manifest.decode(self.store.get(candidate.manifest))
            stored = self.in_place()
            pieces = read(self.store, candidate.weights.digest, manifest) if stored else self.weights(candidate)
            return Base(candidate.weights, manifest, pieces)
        except (TransferError, ContractError, MemoryError) as error:
            log.warning("nothing is told from candidate %s: %r", candidate.id, error)
            return None

    def ready(
        self,
        job: Job,
        saved: Saved,
        optimizer: Blob | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Event:
        """The job's candidate, every part of which is durable."""
        return CandidateReady(
            scenario=job.scenario,
            job=job.id,
            attempt=job.attempt,
            candidate=derived("cand", job.id),
            base=job.base,
            weights=saved.weights,
            optimizer=optimizer,
            manifest=saved.manifest.digest,
            tensor_bytes=saved.manifest.total,
            metrics=dict(metrics or {}),
            delta=saved.delta,
        )

    def _evaluate(self, effect: Evaluate) -> Event:
        found = self.evaluator.evaluate(effect.candidate, effect.metrics)
        return CandidateEvaluated(
            scenario=self.scenario(effect.candidate),
            candidate=effect.candidate.id,
            evaluator=self.evaluator.name,
            metrics=found,
        )

    def _decide(self, effect: Decide) -> Event | None:
        decision = self.selector.decide(effect.candidate, effect.metrics)
        if decision.select is None:
            return None
        kind = CandidateSelected if decision.select else CandidateRejected
        return kind(
            scenario=self.scenario(effect.candidate),
            candidate=effect.candidate.id,
            selector=self.selector.name,
            why=decision.why,
        )

    # -- sending

    async def _offer(self, effect: OfferWeights, scope: contextlib.AsyncExitStack) -> Event:
        target = effect.publication
        try:
            manifest = Manifest.decode(await blocking(self.store.get, target.manifest))
            offer = await self._door(effect, manifest)
            scope.push_async_callback(offer.close)
            if self.config.publication.delta and effect.candidate.delta and target.attempt == 1:
                await blocking(self._tell_delta, offer, effect.candidate.delta)
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

    async def _door(self, effect: OfferWeights, manifest: Manifest) -> Offer:
        target, transport = effect.publication, self.transports[effect.publication.transport]
        source = await blocking(self._source, transport, effect.candidate)
        if isinstance(source, Offer):
            return source
        return await transport.offer(manifest, source, publication=target.id, attempt=target.attempt)

    def _source(self, transport: Transport, candidate: Candidate) -> Offer | Pieces:
        return transport.stored(candidate.weights.digest) or self.weights(candidate)

    def _tell_delta(self, offer: Offer, blob: Blob) -> None:
        """A delta that cannot be read is no reason to fail: then everybody takes the full bytes."""
        from reef_bus.delta import base_of  # an extra (numpy, zstd), for who is configured to send deltas

        try:
            data = self.store.get(blob.digest)
            offer.tell(Delta(base_of(data), data))
        except (TransferError, ContractError, Unavailable, MemoryError) as error:
            log.warning("the full bytes are offered alone: %r", error)
