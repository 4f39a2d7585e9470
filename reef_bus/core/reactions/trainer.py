"""What a trainer's boot owes.

Knows: the world, and who is asking. Must not know: engines, deadlines, or how anything is trained.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.effects import (
    Append,
    AssembleBatch,
    Debt,
    Decide,
    Effect,
    Evaluate,
    Me,
    OfferWeights,
    Register,
    RegisterAdapter,
    Retire,
    Train,
)
from reef_bus.core.ids import BASE
from reef_bus.core.memory import lending
from reef_bus.core.reactions.common import join_or_retire
from reef_bus.core.requests import wanted
from reef_bus.core.serving import holders
from reef_bus.core.training import Job
from reef_bus.core.world import World, can_still_reach
from reef_bus.events import (
    CandidateSelected,
    Event,
    JobAmbiguous,
    JobDiscarded,
    JobDiscardRequested,
    JobRestoreRequested,
    JobStarted,
    PromotionRequested,
    RollbackRequested,
    TrainerRestored,
)


def trainer(world: World, me: Me, scenarios: tuple[str, ...] = (), *, colocate: bool = False) -> list[Debt]:
    """What the trainer's boot owes. It trains the adapters of these `scenarios`; of none: the whole model. With
    `colocate` its jobs take turns with publications."""
    if not world.incarnation:
        return []
    if world.training.boot != me.boot:
        return [join_or_retire(world, me, "train", world.training.boot)]
    if not world.training.scenario:
        return [Debt(key="register", effect=Register(), cause=world.training.joined)]
    if wrong := _other_kind(world, scenarios):
        return [Debt(key="retire", effect=Retire(wrong))]
    for scenario in scenarios:
        if scenario not in world.training.adapters:
            return [_register_adapter(world, scenario)]
    return [*_offer(world, me), *_job(world, me, scenarios, colocate)]


def _other_kind(world: World, scenarios: tuple[str, ...]) -> str:
    """Whole models and adapters are not trained on one log: the base of an adapter must stay what it is."""
    tail, base = world.tails["train"], world.training.scenario
    if base in scenarios:  # to register it would contradict the log, for every reader and for ever
        return f"adapters.scenarios names {base}, which is the base model's on this log: rename it, or use another log"
    if scenarios and tail.whole:
        return f"adapters.scenarios is {list(scenarios)}, but this log trains the whole model: use a log of their own"
    if missing := [each for each in tail.adapters if each not in scenarios]:
        return (
            f"this log trains adapters of {tail.adapters}; adapters.scenarios lacks {', '.join(missing)}, which "
            "engines serve and need room for: name them all. A scenario that nobody reports for is trained no further"
        )
    return ""


def _register_adapter(world: World, scenario: str) -> Debt:
    base = msgspec.structs.replace(world.training.candidates[BASE])
    cause = world.tails["train"].seq
    return Debt(key=f"register/{scenario}", effect=RegisterAdapter(scenario, base), cause=cause)


def _offer(world: World, me: Me) -> list[Debt]:
    open_ = world.publications.open
    if open_ is None or open_.sender != "trainer":
        return []
    candidate = world.training.candidates[open_.candidate]
    return [
        Debt(
            key=f"offer/{open_.attempt_seq}",
            effect=OfferWeights(msgspec.structs.replace(open_), msgspec.structs.replace(candidate)),
            cause=open_.attempt_seq,
            correlation=open_.id,
        )
    ]


def _job(world: World, me: Me, scenarios: tuple[str, ...], colocate: bool) -> list[Debt]:
    training = world.training
    if training.job is None:
        return _next_job(world, scenarios or ("",), colocate)
    job = training.job
    stepping = lending(world.handover) and job.boot == me.boot and not job.candidate  # its end would end the fence
    if (discard := wanted(world.requests, JobDiscardRequested, job.id)) and not stepping:
        discarded = JobDiscarded(scenario=job.scenario, job=job.id, request=discard.seq)
        return [_fact(f"discard/{discard.seq}", discarded, discard.seq, job)]
    if job.candidate:
        return [_decide(world, job)]
    if job.boot != me.boot:
        return _start(world, job)
    train = Train(msgspec.structs.replace(job), msgspec.structs.replace(training.candidates[job.base]))
    return [Debt(key=f"train/{job.started}", effect=train, cause=job.started, correlation=job.id)]


def _start(world: World, job: Job) -> list[Debt]:
    """The next attempt. A dead boot that trained in place leaves behind what nobody knows: then a person decides."""
    scenario, restore = job.scenario, wanted(world.requests, JobRestoreRequested, job.id)
    if job.in_place and not job.ambiguous:
        lost = JobAmbiguous(scenario=scenario, job=job.id, attempt=job.attempt, started_by=job.boot)
        return [_fact(f"ambiguous/{job.started}", lost, job.started, job)]
    if job.ambiguous and restore is None:
        return []
    if lending(world.handover) and (world.publications.open or holders(world)):
        return []
    request, cause = (restore.seq, restore.seq) if restore else (0, job.seq)
    started = JobStarted(scenario=scenario, job=job.id, attempt=job.attempt + 1, request=request)
    return [_fact(f"start/{job.seq}/{job.attempt}", started, cause, job)]


def _fact(key: str, event: Event, cause: int, job: Job) -> Debt:
    return Debt(key=key, effect=Append(event), cause=cause, correlation=job.id)


def _decide(world: World, job: Job) -> Debt:
    candidate, metrics = msgspec.structs.replace(world.training.candidates[job.candidate]), dict(job.metrics)
    if not job.evaluated:
        effect: Effect = Evaluate(candidate, metrics)
        return Debt(key=f"evaluate/{job.ready}", effect=effect, cause=job.ready, correlation=job.id)
    if promotion := wanted(world.requests, PromotionRequested, candidate.id):
        selected = CandidateSelected(
            scenario=job.scenario,
            candidate=candidate.id,
            selector=promotion.actor,
            why=promotion.why,
            request=promotion.seq,
        )
        return _fact(f"promote/{promotion.seq}", selected, promotion.seq, job)
    effect = Decide(candidate, metrics)
    return Debt(key=f"decide/{job.evaluated}", effect=effect, cause=job.evaluated, correlation=job.id)


def _next_job(world: World, scenarios: tuple[str, ...], colocate: bool) -> list[Debt]:
    """Scenarios take turns: whose last job is longest ago comes first, if it has a batch."""
    training = world.training
    since = max(training.closed, training.registered, training.joined)
    for scenario in scenarios:
        head = world.publications.head_of(scenario)
        assert head is not None  # registration made release 0
        if not can_still_reach(world, training.based(scenario)):
            named = scenario or training.scenario
            restored = TrainerRestored(scenario=named, load_id=head.load_id, candidate=head.candidate)
            return [Debt(key=f"restore/{since}/{head.seq}", effect=Append(restored), cause=head.seq)]
    if colocate and (world.publications.open or world.queue or wanted(world.requests, RollbackRequested)):
        return []
    turns = sorted(scenarios, key=lambda each: training.adapters[each].dispatched if each else 0)
    bases = tuple(_base(world, scenario) for scenario in turns)
    effect = AssembleBatch(bases, training.dispatched + 1, dict(training.batches))
    return [Debt(key=f"batch/{since}/{'/'.join(bases)}", effect=effect, cause=since)]


def _base(world: World, scenario: str) -> str:
    """The latest selected candidate that can still reach the head, or the head's."""
    head, known = world.publications.head_of(scenario), world.training.candidates
    assert head is not None
    queue = (c for c in reversed(world.queue) if known[c].scenario == scenario and can_still_reach(world, c))
    return next(queue, head.candidate)
