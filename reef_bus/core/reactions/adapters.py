"""What the agent of an engine owes of LoRA adapters: committed ones first, then that which is being published.

Knows: the world, one engine's residency. Must not know: how an adapter is loaded, or who asks for it.
One thing at a time: each fact of it may change what the next one is. What has an artifact that cannot be loaded comes
last, once that can be read, so that nothing else waits for it; whether it can is looked for beside everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reef_bus.core import residency
from reef_bus.core.effects import Append, AwaitArtifact, Deadlines, Debt, LoadAdapter, UnloadAdapter
from reef_bus.core.ids import adapter_name
from reef_bus.core.membership import Engine
from reef_bus.core.publication import Publication, Release
from reef_bus.core.residency import Refused
from reef_bus.core.world import World
from reef_bus.events import AdapterUnloaded, EngineLeft, Event, Lora, Member, ReceiverFailed

FIRST_S = 0.3
"""After which an artifact is first looked for again; twice as long after each load of it that failed all the same."""
MAX_DOUBLINGS = 13  # of that: 41 minutes, so that some 35 words a day are the most that it costs the log


def adapters(
    world: World, found: Engine, deadlines: Deadlines, lost: frozenset[str], mended: frozenset[int]
) -> list[Debt]:
    """For an engine that holds the head of the base model."""
    if found.residency is None:
        return []
    return [*_next(world, found, lost, mended), *_awaited(world, found, deadlines, mended)]


def _next(world: World, found: Engine, lost: frozenset[str], mended: frozenset[int]) -> list[Debt]:
    state = _state(found)
    owed = _committed(world, found) or _published(world, found) or _again(world, found, mended)
    for name in sorted(residency.reconcile(state, state.slots.keys() - lost).lost):
        if owed and owed[0].effect == UnloadAdapter(name):
            return owed  # it is lost because it was unloaded, which whoever did so says
        gone = AdapterUnloaded(engine=found.id, adapter=name, detail="the engine does not list it")
        return [_debt(found, f"lost/{name}", Append(gone), found.joined)]
    return owed


def _missing(world: World, found: Engine) -> Iterator[Release]:
    """Heads that are not there. One that is being rolled back may be the very one that nobody can load: it is not owed
    meanwhile, or no boot would live to receive what takes its place."""
    open_ = world.publications.open
    leaving = open_.scenario if open_ and open_.request else ""
    for scenario, head in world.publications.adapters.items():
        if head.parent and scenario != leaving and not residency.served(_state(found), scenario):
            yield head


def _committed(world: World, found: Engine) -> list[Debt]:
    """Whose artifact was not to blame."""
    heads = (head for head in _missing(world, found) if head.scenario not in found.failing)
    return _first(world, found, ((head, max(found.joined, head.seq)) for head in heads))


def _again(world: World, found: Engine, mended: frozenset[int]) -> list[Debt]:
    words = ((head, found.failing.get(head.scenario)) for head in _missing(world, found))
    return _first(world, found, ((head, failed.seq) for head, failed in words if failed and failed.seq in mended))


def _first(world: World, found: Engine, heads: Iterable[tuple[Release, int]]) -> list[Debt]:
    """Of these, the first for which there is room."""
    for head, since in heads:
        if debts := _load(found, head, world.training.adapters[head.scenario].lora, since):
            return debts
    return []


def _awaited(world: World, found: Engine, deadlines: Deadlines, mended: frozenset[int]) -> list[Debt]:
    """Beside whatever else is owed, for it touches nothing that anybody serves. However long what can be read fails all
    the same, it is tried again now and then, and the log grows by little, and by no clock."""
    debts = []
    for head in _missing(world, found):
        failed = found.failing.get(head.scenario)
        if failed and failed.seq not in mended:
            first_s = FIRST_S * 2 ** min(failed.tries - 1, MAX_DOUBLINGS)
            wait = AwaitArtifact(failed.seq, head.manifest, head.weights, first_s, deadlines.verify_s)
            debts.append(Debt(key=f"artifact/{head.load_id}/{failed.seq}", effect=wait, cause=failed.seq))
    return debts


def _published(world: World, found: Engine) -> list[Debt]:
    open_ = world.publications.open
    if open_ is None or open_.lora is None or Member(found.id, found.boot) not in open_.members:
        return []
    if world.membership.report(found.boot, open_.id, open_.attempt):
        return []
    return _load(found, open_, open_.lora, open_.attempt_seq)


def _load(found: Engine, what: Release | Publication, lora: Lora, since: int) -> list[Debt]:
    """Once there is room for it. `since`: whatever could not be unloaded later than that, is not tried again for it."""
    room = residency.make_room(_state(found), what.scenario, what.load_id, what.manifest)
    if isinstance(room, Refused):
        return _give_up(found, what, room.reason, room.detail, since)
    if room.unload:
        name = room.unload[0]
        if found.leaks.get(name, 0) > since:
            return _give_up(found, what, "eviction", f"{name} cannot be unloaded", since)
        return [_debt(found, f"unload/{name}", UnloadAdapter(name), since)]
    of = (what.id, what.attempt) if isinstance(what, Publication) else ("", 0)
    load = LoadAdapter(*of, what.scenario, room.name, what.load_id, what.manifest, what.weights, lora, room.held)
    return [_debt(found, f"adapter/{what.load_id}/{since}", load, since, of[0])]


def _give_up(found: Engine, what: Release | Publication, cause: str, detail: str, since: int) -> list[Debt]:
    """A target is another attempt's, or nobody's. What is committed and has no place here is served by others; but a
    boot that cannot be rid of what it need not hold has a better one after it."""
    event: Event
    if isinstance(what, Publication):
        event = ReceiverFailed(
            engine=found.id,
            publication=what.id,
            attempt=what.attempt,
            load_id=what.load_id,
            cause=cause,
            detail=detail,
            staged=True,
            scenario=what.scenario,
            adapter=adapter_name(what.scenario, what.load_id),
        )
    elif cause == "eviction":
        event = EngineLeft(engine=found.id, reason=f"no room for {what.scenario} {what.load_id}: {detail}")
    else:
        return []
    return [_debt(found, f"{cause}/{since}", Append(event), since)]


def _debt(found: Engine, key: str, effect: Append | LoadAdapter | UnloadAdapter, since: int, about: str = "") -> Debt:
    """Whatever this boot last said of adapters made it owed anew."""
    cause = max(since, found.adapted)
    return Debt(key=f"{key}/{found.adapted}", effect=effect, cause=cause, correlation=about)


def _state(found: Engine) -> residency.Residency:
    assert found.residency is not None
    return found.residency
