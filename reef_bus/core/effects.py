"""Effects and debts: what the hands may be asked to do, and what a publisher decides by.

Knows: names and parameters. Must not know: when an effect is owed (`reactions.py`), or how it is performed.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.publication import Publication
from reef_bus.core.training import Candidate, Job
from reef_bus.events import Blob, Event, Lora


class Deadlines(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """How long anybody is waited for, in seconds, counted from the broker's time of the event that began the wait."""

    fence_s: float = 30.0
    sender_s: float = 30.0
    stall_s: float = 10.0
    verify_s: float = 30.0
    heartbeat_s: float = 10.0


class Restarts(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """At most `max_restarts` of a component within `window_s`, after 1, 2, then 4 × `delay_s`; counted from the log.
    A process whose boot was excluded or has left is ended by force after `grace_s`."""

    max_restarts: int = 3
    window_s: float = 300.0
    delay_s: float = 1.0
    grace_s: float = 5.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher decides by, beside the log. `publish` is `every` candidate in its turn, or the `latest` one;
    `transport` the only one that may be used, or empty: the first that the trainer offers and every engine accepts.
    `keep`: how many releases before the head a rollback may go back to; 0: all."""

    transport: str = ""
    mode: str = "fenced"
    pause: str = "drain"
    publish: str = "every"
    deadlines: Deadlines = Deadlines()
    keep: int = 0


class Effect(msgspec.Struct, frozen=True):
    """Something that ends in a fact."""


class Append(Effect, frozen=True):
    """Nothing to do first: the fact itself."""

    event: Event


class Join(Effect, frozen=True):
    """Announce this boot."""


class Register(Effect, frozen=True):
    """Store the base model; ends in `ScenarioRegistered`."""


class RegisterAdapter(Effect, frozen=True):
    """Store the adapter that changes nothing; ends in `AdapterRegistered`."""

    scenario: str
    base: Candidate


class AssembleBatch(Effect, frozen=True):
    """Wait for an eligible batch for a job from one of the `bases`, the first of them that has one; make it durable;
    ends in `JobDispatched`. `batches` are those of the latest jobs, by scenario as in `Training`."""

    bases: tuple[str, ...]
    step: int
    batches: dict[str, Blob]


class Train(Effect, frozen=True):
    """Take the job's optimizer steps and store what comes out; ends in `CandidateReady` or `JobDropped`."""

    job: Job
    base: Candidate


class Evaluate(Effect, frozen=True):
    """Measure the candidate; ends in `CandidateEvaluated`."""

    candidate: Candidate
    metrics: dict[str, float]


class Decide(Effect, frozen=True):
    """Select or reject the candidate."""

    candidate: Candidate
    metrics: dict[str, float]


class OfferWeights(Effect, frozen=True):
    """Offer the target's bytes for one attempt, as long as it is open; ends in `SenderReady` or `SenderFailed`."""

    publication: Publication
    candidate: Candidate


class Fence(Effect, frozen=True):
    """Stop generation as `pause` says, destroy every older ingress; ends in `EngineFenced`."""

    publication: str
    attempt: int
    pause: str = "drain"


class Ingress(Effect, frozen=True):
    """What lets the target's bytes in, for one attempt."""

    publication: str
    attempt: int
    load_id: str
    manifest: str
    transport: str
    address: str
    token: str
    stall_s: float


class Receive(Ingress, frozen=True):
    """Receive the target from the ticket into fenced memory and hash it; ends in a report."""


class Stage(Ingress, frozen=True):
    """Receive the target beside what goes on serving and hash it there; ends in `EngineStaged` or `ReceiverFailed`."""


class VerifyHead(Effect, frozen=True):
    """Prove the head in memory, by swapping in what was staged or loading its artifact if need be; ends in
    `ReceiverVerified`, or ends the boot. Whoever still generates stops for it as `pause` says."""

    load_id: str
    manifest: str
    weights: Blob
    pause: str = "drain"


class LoadAdapter(Effect, frozen=True):
    """Load the adapter from its artifact beside what is served, and prove it; ends in `EngineStaged` or
    `ReceiverFailed`, or, where it is committed (no `publication`) and the engine is to blame, ends the boot. With
    `held` its bytes are there already, under this name, and only to be proven."""

    publication: str
    attempt: int
    scenario: str
    name: str
    load_id: str
    manifest: str
    weights: Blob
    lora: Lora
    held: bool = False


class AwaitArtifact(Effect, frozen=True):
    """Look for the artifact of a committed adapter, of which `failed` is the last word, until it can be read; first
    after `first_s`, then less and less often, down to every `every_s`. Ends in no fact: the load is owed again."""

    failed: int
    manifest: str
    weights: Blob
    first_s: float
    every_s: float


class UnloadAdapter(Effect, frozen=True):
    """Be rid of an adapter once no request in hand names it; ends in `AdapterUnloaded` or `AdapterLeaked`."""

    name: str


class ReleaseMemory(Effect, frozen=True):
    """Stop generation, after the requests in hand, destroy every older ingress, and give the memory of `regions` to
    `job`, whose fence was raised at `fence`; ends in `EngineMemoryReleased`, or ends the boot."""

    job: str
    fence: int
    regions: tuple[str, ...]


class RestoreMemory(Effect, frozen=True):
    """Take back the memory of `regions`; ends in `EngineMemoryRestored`, or ends the boot."""

    job: str
    regions: tuple[str, ...]


class StartComponent(Effect, frozen=True):
    """Start a component's process, for the `starts`-th time; ends in `ComponentStarted`."""

    component: str
    starts: int


class CleanUp(Effect, frozen=True):
    """End whatever is left of a component's process; ends in `ComponentLost`, or in `CleanupUnconfirmed`."""

    component: str


class Retire(Effect, frozen=True):
    """This boot is over; its process ends."""

    why: str


class Debt(msgspec.Struct, frozen=True, kw_only=True):
    """One thing owed. `at_head`: a judgement about time, valid only on a fold that reached the stream's head."""

    key: str
    effect: Effect
    cause: int = 0
    correlation: str = ""
    at_head: bool = False


class Me(msgspec.Struct, frozen=True):
    """Who is asking: a component's id and its boot."""

    id: str
    boot: str
