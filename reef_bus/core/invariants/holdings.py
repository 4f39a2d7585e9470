"""What each boot holds of LoRA adapters, and what answers may have been made with: invariants 1, 2 and 10 of them.

Knows: raw events about adapters, and their names. Must not know: the fold, its residencies, or who decides.
A proof counts from the event that says it until one that takes it back; an answer lies wholly between the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from reef_bus.core.ids import adapter_name, parse_load_id
from reef_bus.core.invariants.findings import Findings
from reef_bus.core.invariants.records import Answer, Answers
from reef_bus.events import (
    AdapterLeaked,
    AdapterUnloaded,
    EngineJoined,
    EngineStaged,
    Lora,
    Member,
    ReceiverFailed,
    Recorded,
    TargetPersisted,
)

Turns = list[int]
"""Sequences: since when something is held, since when no more, since when again, and so on."""


class Boot(msgspec.Struct):
    """What one boot said: how many adapters it holds at most, the load ids that it proved by the name they go under,
    those that it last had under a name that has `leaked` since, or is `gone`, and every name that may take a place in
    it."""

    capacity: int | None
    proven: dict[str, list[str]] = {}
    leaked: dict[str, list[str]] = {}
    gone: dict[str, list[str]] = {}
    taken: set[str] = set()
    turns: dict[str, Turns] = {}


class Holdings(msgspec.Struct):
    """`loras` of the scenarios that train adapters; `heads` by scenario, each with the sequence since which it is that;
    `targets` by load id: which scenario's adapter it is, and what it hashes to."""

    loras: dict[str, Lora] = {}
    heads: dict[str, list[tuple[int, str]]] = {}
    targets: dict[str, tuple[str, str]] = {}
    boots: dict[str, Boot] = {}


def head(holdings: Holdings, scenario: str) -> str:
    return holdings.heads[scenario][-1][1]


# -- what engines say


def join(holdings: Holdings, recorded: Recorded, event: EngineJoined) -> None:
    if event.adapters != 0:
        holdings.boots[recorded.boot] = Boot(event.adapters, taken=set(event.resident))


def stage(holdings: Holdings, recorded: Recorded, event: EngineStaged, findings: Findings) -> str:
    """Why it proves nothing, or an empty string. A word that is not true of its load id is the opposite of a proof."""
    boot = holdings.boots.get(recorded.boot)
    if boot is None:
        return "had joined as an engine that takes no adapters"
    boot.taken.add(event.adapter)
    if flaw := _flaw(holdings, boot, event):
        _undo(boot, recorded.seq, event.adapter)
        return flaw
    _prove(boot, recorded, event, findings)
    return ""


def _prove(boot: Boot, recorded: Recorded, event: EngineStaged, findings: Findings) -> None:
    loaded = not boot.proven.get(event.adapter)  # what it had proved to hold is only proven again
    if loaded and boot.capacity is not None and len(boot.taken) > boot.capacity:
        said = f"{event.engine} boot {recorded.boot} holds {len(boot.taken)} adapters from LOG {recorded.seq} on"
        findings.add(10, f"{said}; it has room for {boot.capacity}", [recorded.seq])
    names = boot.proven.setdefault(event.adapter, [])
    if event.load_id not in names:
        names.append(event.load_id)
        boot.turns.setdefault(event.load_id, []).append(recorded.seq)


def _flaw(holdings: Holdings, boot: Boot, event: EngineStaged) -> str:
    """An adapter goes under a name of its own, or under that of the same bytes of its scenario, which the boot had
    proved to hold, or to have held when it was gone."""
    named = holdings.targets.get(event.load_id)
    if named != (event.scenario, event.manifest):
        return f"says that {event.load_id} is {event.manifest} of {event.scenario!r}; its target says {named}"
    known = boot.proven.get(event.adapter) or boot.gone.get(event.adapter, [])
    if event.adapter != adapter_name(event.scenario, event.load_id) and named not in map(holdings.targets.get, known):
        return f"calls {event.load_id} {event.adapter}, of which it has proved {known}"
    return ""


def fail(holdings: Holdings, recorded: Recorded, event: ReceiverFailed, findings: Findings) -> None:
    boot = holdings.boots.get(recorded.boot)
    if boot is None or not event.adapter:
        return
    if not event.publication:
        _miss(holdings, boot, recorded, event, findings)
        return
    boot.taken.add(event.adapter)
    for names in boot.proven.values():
        if event.load_id in names:
            names.remove(event.load_id)
            boot.turns[event.load_id].append(recorded.seq)


def _miss(holdings: Holdings, boot: Boot, recorded: Recorded, event: ReceiverFailed, findings: Findings) -> None:
    """An artifact that its engine was given nothing of: it takes no place, and nothing away. Nobody loads what was
    never the scenario's head, or what it had proved to hold."""
    said = f"{event.engine} boot {recorded.boot} says at LOG {recorded.seq} that it cannot load {event.load_id}"
    if event.load_id not in (load_id for _, load_id in holdings.heads.get(event.scenario, ())):
        findings.add("adapter", f"{said}, which was never the head of {event.scenario!r}", [recorded.seq])
    elif any(event.load_id in load_ids for load_ids in boot.proven.values()):
        findings.add("adapter", f"{said}, which it had proved to hold", [recorded.seq])


def unload(holdings: Holdings, recorded: Recorded, event: AdapterUnloaded | AdapterLeaked, findings: Findings) -> None:
    """Nobody parts with what is a head; an engine may have lost it, and then says so."""
    boot = holdings.boots.get(recorded.boot)
    if boot is None:
        return
    heads = {head(holdings, scenario) for scenario in holdings.heads}
    told = type(event) is AdapterLeaked or not event.detail
    if told and (current := heads.intersection(boot.proven.get(event.adapter, ()))):
        said = f"{event.engine} boot {recorded.boot} was told at LOG {recorded.seq} to unload {event.adapter}"
        findings.add("adapter", f"{said}, which is the head {', '.join(sorted(current))}", [recorded.seq])
    names = boot.proven.get(event.adapter) or boot.leaked.pop(event.adapter, [])
    if type(event) is AdapterLeaked:
        boot.leaked[event.adapter] = names
    else:
        boot.taken.discard(event.adapter)
        boot.gone[event.adapter] = names or boot.gone.get(event.adapter, [])  # what takes its place may go by its name
    _undo(boot, recorded.seq, event.adapter)


def _undo(boot: Boot, seq: int, name: str) -> None:
    for load_id in boot.proven.pop(name, []):
        boot.turns[load_id].append(seq)


# -- what publishers say


def target(holdings: Holdings, event: TargetPersisted) -> Iterator[tuple[int | str, str]]:
    """What is wrong with the target of an adapter; it is entered all the same."""
    lora = holdings.loras.get(event.scenario)
    if event.lora != lora:
        yield 3, f"as adapter {event.lora}; {event.scenario} was registered with {lora}"
    if event.mode != "staged" or event.sender != "artifact":
        yield "adapter", f"in mode {event.mode} from the {event.sender}; an adapter stops nobody, and nobody sends it"
    for member in event.members:
        if why := _no_room(holdings, member, event):
            yield 10, why
    holdings.targets.setdefault(event.load_id, (event.scenario, event.manifest))


def _no_room(holdings: Holdings, member: Member, event: TargetPersisted) -> str:
    """Heads stay where they are, and the adapter needs a place beside them, unless its bytes are there."""
    boot = holdings.boots.get(member.boot)
    if boot is None:
        return f"for {member.engine} boot {member.boot}, which takes no adapters"
    heads = {head(holdings, scenario) for scenario in holdings.heads}
    kept = [name for name, load_ids in boot.proven.items() if heads.intersection(load_ids)]
    there = any(
        holdings.targets[id_] == (event.scenario, event.manifest) for ids in boot.proven.values() for id_ in ids
    )
    if there or boot.capacity is None or len(kept) < boot.capacity:
        return ""
    return f"for {member.engine} boot {member.boot}, which holds {boot.capacity} adapters and may part with none"


# -- answers


def check_answers(holdings: Holdings, answers: Answers, findings: Findings) -> None:
    """Of scenarios that train adapters: by what was it made, and did the boot hold that all the time. What was given
    before this log began is audited with its predecessor."""
    if not holdings.heads:
        return
    for answer in answers.by_id.values():
        if answer.scenario in holdings.heads and not 0 < answer.as_of <= answers.begin:
            for invariant, text, seqs in _wrong_answer(holdings, answer):
                said = f"record {answer.record} by {answer.engine} boot {answer.boot} names {answer.load_id}"
                findings.add(
                    invariant, f"{said} for {answer.scenario} as of LOG {answer.as_of}, {text}", seqs, [answer.seq]
                )


def _wrong_answer(holdings: Holdings, answer: Answer) -> Iterator[tuple[int, str, list[int]]]:
    heads = holdings.heads[answer.scenario]
    place = bisect_right(heads, answer.as_of, key=lambda each: each[0])
    if answer.load_id not in (load_id for _, load_id in heads[:place]):
        yield 1, "which was not committed for it", [answer.as_of]
        return
    if heads[place - 1][1] != answer.load_id:
        yield 2, f"when its head was {heads[place - 1][1]}", [answer.as_of]
    if any(span.load_id != answer.load_id for span in answer.spans):
        yield 2, f"and goes on with {answer.spans[-1].load_id}: an adapter ends what it began", [answer.as_of]
    if parse_load_id(answer.load_id).sequence:
        yield from _not_held(holdings, answer)


def _not_held(holdings: Holdings, answer: Answer) -> Iterator[tuple[int, str, list[int]]]:
    boot = holdings.boots.get(answer.boot)
    turns = boot.turns.get(answer.load_id, []) if boot else []
    place = bisect_right(turns, answer.as_of)
    if place % 2 == 0:
        yield 1, "which this boot had not proved to hold", [answer.as_of]
    elif place < len(turns) and turns[place] <= answer.done_as_of:
        yield 2, f"and said at LOG {turns[place]} that it holds it no more, before it was done", [turns[place]]
