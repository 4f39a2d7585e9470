"""The trainer: eligible batch → job → candidate → decision, and the sender of what publishers have targeted.

Knows: its backend, the artifact store, the transports. Must not know: engines, publications' fate, or when to do what:
`core/reactions.py` says what is owed.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from consumers.reef_trainer.book import RecordBook
from reef_bus import process
from reef_bus.artifacts import ArtifactStore, save_weights
from reef_bus.authority import Authority
from reef_bus.backends import Pieces, TrainingBackend
from reef_bus.collector import without_collector
from reef_bus.config import ATTACHED, Config
from reef_bus.core.effects import AssembleBatch, Debt, Me, RegisterAdapter, Train
from reef_bus.core.ids import BASE, adapter_base, derived
from reef_bus.core.retention import retention
from reef_bus.core.training import Candidate, Job
from reef_bus.core.world import World
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.events import AdapterRegistered, Blob, Event, JobDispatched, JobDropped, Lora, Recorded
from reef_bus.journal import Journal
from reef_bus.manifest import Manifest
from reef_bus.runner import Role, blocking
from reef_bus.samples import Batch, encode_batch
from reef_bus.stored import Saved, as_file, blob_file, save
from reef_bus.sweep import sweep

KEPT_STATES = 3  # of each scenario: the head, the candidate being published, and the one being trained

Adapting = Callable[[Path, Lora], TrainingBackend]
"""Makes what trains such adapters over the base model in this file."""


def whole_models_only(base: Path, lora: Lora) -> TrainingBackend:
    raise ContractError("this trainer's backend trains no adapters: take adapters.scenarios out")


class Trained(NamedTuple):
    """What a job's attempt has come to, before all of it is durable."""

    job: tuple[str, int]
    state: Any
    metrics: Mapping[str, float]


class Trainer(Authority):
    """One boot of the trainer."""

    def __init__(
        self,
        config: Config,
        me: Me,
        backend: TrainingBackend,
        store: ArtifactStore,
        book: RecordBook,
        adapting: Adapting = whole_models_only,
    ) -> None:
        """`backend` trains the whole model, and makes it; what `adapting` makes, trains adapters over it."""
        super().__init__(config, me, store)
        self.backend = backend
        self.book = book
        self.adapting = adapting
        self._adapters: dict[Lora, TrainingBackend] = {}
        self.world = World()
        self._gone = set[str]()  # blobs that were removed
        self._states: dict[str, Any] = {}
        self._keep = KEPT_STATES * max(1, len(config.adapters.scenarios))
        if config.training.colocate:
            self._keep = 0  # their memory is the engines'
        self._trained: Trained | None = None
        self._kept = threading.Lock()  # an offer loads in one thread while a job trains in another

    def in_place(self) -> bool:
        return self.backend.mutates_in_place and not self.config.adapters.scenarios

    def react(self, world: World, now: int) -> Sequence[Debt]:
        debts = super().react(world, now)
        if 0 < self.config.training.max_jobs <= world.training.dispatched:
            return [debt for debt in debts if not isinstance(debt.effect, AssembleBatch)]
        return debts

    def folded(self, world: World, batch: Sequence[Recorded]) -> None:
        self.world = world
        self.book.moved(world)

    async def perform(self, debt: Debt, scope: contextlib.AsyncExitStack) -> Event | None:
        """Before a step, when nobody here stores anything, what nobody needs any more is removed."""
        if isinstance(debt.effect, Train) and self.config.artifacts.keep:
            found = retention(self.world, self.config.artifacts.keep)
            await blocking(sweep, self.store, self.config, found, self._gone)
        return await super().perform(debt, scope)

    def register(self) -> Event:
        state = self._remember(BASE, self.backend.initial())
        weights, manifest = save_weights(self.store, self.backend.weights(state))
        return self.registered("grpo", weights, self._again(manifest), self._optimizer(self.backend, state))

    def register_adapter(self, effect: RegisterAdapter) -> Event:
        lora = self.config.adapters.lora()
        backend = self._adapting(lora, effect.base)
        state = self._remember(adapter_base(effect.scenario), backend.initial())
        weights, manifest = save_weights(self.store, backend.weights(state))
        return AdapterRegistered(
            scenario=effect.scenario,
            base_manifest=effect.base.manifest,
            lora=lora,
            weights=weights,
            optimizer=self._optimizer(backend, state),
            manifest=self._again(manifest).digest,
            tensor_bytes=manifest.total,
        )

    def weights(self, candidate: Candidate) -> Pieces:
        return self._backend(candidate).weights(self._state(candidate))

    def _backend(self, candidate: Candidate) -> TrainingBackend:
        """Who trains from it. What an adapter is, was settled when its scenario was registered."""
        if not candidate.scenario:
            return self.backend
        training = self.world.training
        return self._adapting(training.adapters[candidate.scenario].lora, training.candidates[BASE])

    def _adapting(self, lora: Lora, base: Candidate) -> TrainingBackend:
        with self._kept:
            if lora not in self._adapters:
                with self._readable(base), self._file(base) as path:
                    self._adapters[lora] = self.adapting(path, lora)
            return self._adapters[lora]

    # -- jobs

    async def assemble(self, effect: AssembleBatch) -> Event:
        base, units, samples, consumed = await self.book.batch(effect.bases, effect.batches)
        adapter = self.world.training.scenario_of(base)
        job = derived("job", effect.step, base, *(unit.record for unit in units))
        batch = Batch(
            job=job,
            step=effect.step,
            base=base,
            seed=self.config.training.seed + effect.step,
            samples=tuple(samples),
            records=tuple((unit.record, unit.seq) for unit in units),
            floor=consumed.floor,
            taken=tuple(sorted(consumed.taken)),
            scenario=adapter,
        )
        blob: Blob = await blocking(self.store.put, encode_batch(batch))
        return JobDispatched(
            scenario=adapter or self.config.scenario,
            job=job,
            step=effect.step,
            base=base,
            batch=blob,
            records=len(units),
            colocated=self.config.training.colocate,
        )

    def train(self, effect: Train, batch: Batch) -> Event:
        """A store that does not take what was trained is asked again, and nothing is trained again for it."""
        job = effect.job
        if self._trained is None or self._trained.job != (job.id, job.attempt):
            base = self._state(effect.base)  # a damaged one is not the batch's fault: that halts, and drops nothing
            try:
                self._trained = self._step(self._backend(effect.base), job, base, batch)
            except ContractError as error:
                return JobDropped(scenario=job.scenario, job=job.id, reason="not_trainable", detail=str(error))
        trained = self._trained
        saved = self._save(self._remember(derived("cand", job.id), trained.state), effect.base)
        made = self.ready(job, saved, self._optimizer(self._backend(effect.base), trained.state), trained.metrics)
        self._trained = None
        return made

    def _train(self, effect: Train) -> Event:
        """What comes of it says, where engines wait for their memory, that the step's is free."""
        made = super()._train(effect)
        self._give_back()
        return made

    def _give_back(self) -> None:
        if self.config.training.colocate:
            self.backend.release()

    def _step(self, backend: TrainingBackend, job: Job, base: Any, batch: Batch) -> Trained:
        if backend.mutates_in_place:
            self._forget()
        return Trained((job.id, job.attempt), *backend.train(base, batch.samples, batch.seed))

    def _save(self, state: Any, base: Candidate) -> Saved:
        """Make a candidate durable; the manifest is read back, so that what the log names is what can be loaded. An
        adapter is small, and kept in full."""
        weights = self._backend(base).weights(state)
        if self.config.tells_deltas() and not base.scenario:
            saved = save(self.store, weights, self.base(base), self.config.artifacts.anchor_every)
        else:
            saved = Saved(*save_weights(self.store, weights))
        return saved._replace(manifest=self._again(saved.manifest))

    def _again(self, manifest: Manifest) -> Manifest:
        return Manifest.decode(self.store.get(manifest.digest))

    def _optimizer(self, backend: TrainingBackend, state: Any) -> Blob:
        return self.store.put(backend.optimizer(state))

    def _state(self, candidate: Candidate) -> Any:
        with self._kept:
            found = self._states.get(candidate.id)
        if found is None:
            found = self._load(candidate)
        return self._remember(candidate.id, found)

    def _load(self, candidate: Candidate) -> Any:
        kept = candidate.optimizer
        with self._readable(candidate), contextlib.ExitStack() as stack:
            weights = stack.enter_context(self._file(candidate))
            optimizer = stack.enter_context(blob_file(self.store, kept.digest)) if kept else None
            return self._backend(candidate).load(weights, optimizer)

    def _file(self, candidate: Candidate) -> contextlib.AbstractContextManager[Path]:
        return as_file(self.store, candidate.weights.digest, candidate.manifest, Path(self.config.state_dir, "scratch"))

    @contextlib.contextmanager
    def _readable(self, candidate: Candidate) -> Iterator[None]:
        try:
            yield
        except TransferError as error:
            raise ContractError(f"candidate {candidate.id} cannot be read: {error}") from error

    def _remember(self, candidate: str, state: Any) -> Any:
        with self._kept:
            self._states.pop(candidate, None)
            self._states[candidate] = state
            while len(self._states) > self._keep:
                del self._states[next(iter(self._states))]
        return state

    def _forget(self) -> None:
        """What is about to be changed is no candidate's state any more: whoever needs one loads its artifact."""
        with self._kept:
            self._states.clear()


async def _build(config: Config, journal: Journal, me: Me, stack: contextlib.AsyncExitStack) -> Role:
    if config.training.backend == ATTACHED:
        raise Rejected("training.backend is attached: the trainer is a loop of your own (reef_bus.attach), not a role")
    backend: TrainingBackend = await blocking(_backend, config)
    store = ArtifactStore(config.artifact_root())
    shutil.rmtree(config.folder("scratch"))  # what a boot that was killed had left there
    book = RecordBook(config, journal, store)
    await book.start(stack)
    return Trainer(config, me, backend, store, book, partial(_adapting, config))


def _backend(config: Config) -> TrainingBackend:
    with without_collector():
        from consumers.reef_trainer.torch_backend import TorchTrainer

    return TorchTrainer(*_of(config))


def _adapting(config: Config, base: Path, lora: Lora) -> TrainingBackend:
    try:
        with without_collector():
            from consumers.reef_trainer.lora_backend import LoraTrainer
    except ModuleNotFoundError as error:
        raise Rejected(f"adapters.scenarios needs an extra ({error}): pip install 'reef-bus[lora]'") from error
    shape, hyper = _of(config)
    backend: TrainingBackend = LoraTrainer(shape, base, lora, hyper)
    return backend


def _of(config: Config) -> tuple[Any, Any]:
    """The policy's shape, and what steers its updates."""
    from consumers.reef_trainer.torch_backend import Hyper
    from reef_bus.model_folder import read_policy_config
    from reef_bus.policy import PolicyConfig

    training, model = config.training, config.inference.model_path
    hyper = Hyper(lr=training.lr, minibatches=training.minibatches, seed=training.seed)
    return read_policy_config(Path(model)) if model else PolicyConfig(), hyper


def run(config: Config, id_: str) -> int:
    """Run the trainer in this process; returns its exit status."""
    return process.run(id_, config, _build)
