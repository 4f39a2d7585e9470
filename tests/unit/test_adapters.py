"""Adapters on the log: what each event of them does to a world, and who then owes what.

Knows: two scenarios over one frozen base, engines with room for three adapters. Must not know: how one is loaded.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reef_bus.core import reactions
from reef_bus.core.effects import Append, AssembleBatch, Debt, LoadAdapter, Me, Policy, RegisterAdapter, UnloadAdapter
from reef_bus.core.serving import Version, version
from reef_bus.core.start import PER_SCENARIO, compact, decode_start, encode_start, unrest, why_not
from reef_bus.core.world import World, fold
from reef_bus.events import (
    AdapterUnloaded,
    EngineLeft,
    Evidence,
    PublicationHalted,
    PublicationRefused,
    ReceiverFailed,
    ReleaseCommitted,
    TargetPersisted,
    TrainerRestored,
    TransferAborted,
)
from tests.facts import (
    CODE,
    E0,
    E1,
    FROZEN,
    LORA,
    MATH,
    NO_LORA,
    REGISTERED,
    SERVING,
    L,
    S,
    aborted,
    adapter_caught_up,
    adapter_committed,
    adapter_failed,
    adapter_registered,
    adapter_released,
    adapter_rollback_asked,
    adapter_staged,
    adapter_target,
    adapter_trained,
    blob,
    colocated,
    digest,
    dispatched,
    dropped,
    halted,
    holds,
    joined,
    joined_with,
    leaked,
    m,
    name,
    of,
    opened,
    refused,
    rollback_asked,
    trainer_joined,
    unloaded,
)
from tests.spec import Scribe, Step, by, contradicts, counts, facts_of, given, only, publisher_debts, void
from tests.unit.test_start import audited, continued, first, start_of_log

SCENARIOS = (MATH, CODE)


def trainer_owes(world: World, *scenarios: str) -> list[Debt]:
    return reactions.trainer(world, Me("trainer", "t1"), scenarios or SCENARIOS)


def owes(world: World, engine: str, boot: str = "", lost: tuple[str, ...] = ()) -> object:
    """What an engine owes, one thing at a time: a fact or an effect; None if nothing."""
    debts = reactions.engine(world, Me(engine, boot or f"{engine}.1"), Policy().deadlines, lost=frozenset(lost))
    assert len(debts) <= 1
    effect = debts[0].effect if debts else None
    return effect.event if isinstance(effect, Append) else effect


def answers(world: World, engine: str) -> dict[str, str | None]:
    """By scenario: with which load id, and under which name."""
    found = {each: version(world, world.membership.engines[engine], each) for each in SCENARIOS}
    return {each: f"{v.load_id} {v.adapter}".strip() if v else None for each, v in found.items()}


def load(scenario: str, n: int, candidate: str, publication: str = "", held_as: str = "") -> LoadAdapter:
    attempt = 1 if publication else 0
    at = held_as or name(scenario, n)
    return LoadAdapter(
        publication, attempt, scenario, at, L(n), digest(candidate), blob(candidate), LORA, held=bool(held_as)
    )


ONE: tuple[Step, ...] = (*adapter_trained(MATH, "m1"), *adapter_released(MATH, 1, "m1", E0, E1))
TWO: tuple[Step, ...] = (*ONE, *adapter_trained(CODE, "c1"), *adapter_released(CODE, 2, "c1", E0, E1))
"""Both scenarios have an adapter, and there is room for one more."""
THREE: tuple[Step, ...] = (*TWO, *adapter_trained(MATH, "m2", "m1"), *adapter_released(MATH, 3, "m2", E0, E1, parent=1))
"""Math has a second one: no place is free, and the first may go."""


# -- registration


def test_a_scenario_begins_with_the_base_model_as_its_release_0() -> None:
    world = given(*FROZEN).then()
    assert answers(world, "e0") == {MATH: L(0), CODE: L(0)}
    assert version(world, world.membership.engines["e0"], "") == Version(L(0))
    assert version(world, world.membership.engines["e0"], S) == Version(L(0))
    assert version(world, world.membership.engines["e0"], "poetry") is None
    assert world.training.adapters[MATH].base == NO_LORA[MATH]


def test_a_scenario_is_registered_once() -> None:
    given(*FROZEN).when(adapter_registered(MATH)).then(void("math is registered already"))


def test_no_adapter_is_registered_where_the_whole_model_is_trained() -> None:
    given(*SERVING, dispatched("j1")).when(adapter_registered(MATH)).then(void("the whole model is trained here"))


def test_no_adapter_is_registered_before_its_base() -> None:
    given(opened(), trainer_joined()).when(adapter_registered(MATH)).then(void("no base model yet"))


def test_no_adapter_is_registered_on_a_log_that_goes_on_from_one_that_trained_the_whole_model() -> None:
    old = given(*SERVING, dispatched("j1"), dropped("j1")).world
    world, scribe = World(start=compact(old.seq, old.last_id, old.training, old.publications)), Scribe()
    opening = replace(opened(), predecessor="LOG", predecessor_seq=old.seq, predecessor_id=old.last_id, start=blob("s"))
    for event in (opening, by("t2", trainer_joined()), by("t2", adapter_registered(MATH))):
        recorded = scribe.write(event)
        why = fold(world, replace(recorded, seq=old.seq + recorded.seq, prev=world.tail(recorded.event.chain)))
    assert why == "the whole model is trained here"


@pytest.mark.parametrize("room", [0, -1])
def test_an_engine_that_joins_without_room_takes_no_adapters(room: int) -> None:
    world = given(*REGISTERED, joined_with("e0", room)).then()
    assert world.membership.engines["e0"].residency is None


def test_an_adapter_of_another_base_is_a_contradiction() -> None:
    given(*REGISTERED).when(adapter_registered(MATH, digest("other"))).then(contradicts("base model is not"))
    given(*REGISTERED).when(adapter_registered(S)).then(contradicts("is the base model's scenario"))


def test_the_trainer_registers_each_scenario_in_turn_and_only_then_waits_for_batches() -> None:
    world = given(*REGISTERED).then()
    effect = only(trainer_owes(world))
    assert isinstance(effect, RegisterAdapter) and effect.scenario == MATH and effect.base.manifest == digest("base")
    effect = only(trainer_owes(given(*REGISTERED, adapter_registered(MATH)).then()))
    assert isinstance(effect, RegisterAdapter) and effect.scenario == CODE
    assert isinstance(only(trainer_owes(given(*FROZEN).then())), AssembleBatch)


def test_a_trainer_of_the_other_kind_retires() -> None:
    whole = given(*SERVING, dispatched("j1")).then()
    assert "log of their own" in only(trainer_owes(whole)).why  # type: ignore[attr-defined]
    adapters = given(*FROZEN).then()
    found = reactions.trainer(adapters, Me("trainer", "t1"))
    assert "lacks math, code" in only(found).why  # type: ignore[attr-defined]
    assert "lacks code" in only(trainer_owes(adapters, MATH)).why  # type: ignore[attr-defined]


def test_the_base_models_scenario_is_never_registered_as_an_adapters() -> None:
    """Every reader would halt on it, for ever. What was called so before the configuration changed, is still."""
    given(*REGISTERED).when(adapter_registered(S)).then(contradicts("the base model's scenario"))
    found = reactions.trainer(given(*REGISTERED).then(), Me("trainer", "t1"), (S, MATH))
    assert f"names {S}, which is the base model's" in only(found).why  # type: ignore[attr-defined]


def test_a_frozen_base_is_never_trained_and_no_scenario_from_anothers_adapter() -> None:
    given(*FROZEN).when(dispatched("j1")).then(contradicts("digit is not trained from base"))
    step = of(MATH, dispatched("j1", NO_LORA[CODE]))[0]
    given(*FROZEN).when(step).then(contradicts("math is not trained from .* of code"))


def test_no_engine_lends_its_memory_to_the_job_of_an_adapter() -> None:
    (step,) = of(MATH, colocated("j1", NO_LORA[MATH]))
    given(*FROZEN).when(step).then(contradicts("it is colocated, and trains math's adapter"))


def test_a_log_that_goes_on_has_every_scenarios_head_and_chain_and_its_engines_hold_nothing_yet() -> None:
    history = (*FROZEN, *adapter_trained(MATH, "m1"), *adapter_released(MATH, 1, "m1", E0, E1))
    before = given(*history).then()
    assert unrest(before.training, before.publications, before.requests, before.components) == ""
    start = decode_start(encode_start(start_of_log(*history)))
    assert start.format == PER_SCENARIO and why_not(start) == ""
    after = World(start=start)
    for recorded in continued(start, first(start), joined_with("e0")):
        assert fold(after, recorded) == ""
    for scenario in SCENARIOS:
        assert after.publications.head_of(scenario) == before.publications.head_of(scenario)
        assert after.publications.origins[scenario] == before.publications.origins[scenario]
        assert after.training.adapters[scenario] == before.training.adapters[scenario]
    assert after.tails["train"].adapters == [MATH, CODE] and not after.tails["train"].whole
    state = after.membership.engines["e0"].residency
    assert state is not None and state.slots == {} and state.current == {MATH: L(1), CODE: L(0)}


def test_a_start_whose_scenario_has_no_head_contradicts_itself() -> None:
    start = start_of_log(*FROZEN)
    lost = replace(start, adapters=(replace(start.adapters[0], head=L(7)), *start.adapters[1:]))
    assert "the head inc:7 of math is no release" in why_not(lost)


# -- turns, and bases


def bases(world: World) -> tuple[str, ...]:
    effect = only(trainer_owes(world))
    assert isinstance(effect, AssembleBatch)
    return effect.bases


def test_who_trained_last_comes_last() -> None:
    assert bases(given(*FROZEN).then()) == (NO_LORA[MATH], NO_LORA[CODE])
    once = given(*FROZEN, *adapter_trained(MATH, "m1")).then()
    assert bases(once) == (NO_LORA[CODE], "m1")
    assert bases(given(*FROZEN, *adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1")).then()) == ("m1", "c1")


@pytest.mark.parametrize(
    "lost",
    [
        (adapter_target(MATH, 1, "m1", E0, E1), *of(MATH, halted(1))),
        of(MATH, refused("m1", "adapter_capacity")),
    ],
    ids=["halted", "refused"],
)
def test_only_the_scenario_whose_base_is_lost_goes_back_to_its_head(lost: tuple[Step, ...]) -> None:
    world = given(*FROZEN, *adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1"), *lost).then()
    assert facts_of(trainer_owes(world)) == [
        TrainerRestored(scenario=MATH, load_id=L(0), candidate=NO_LORA[MATH]),
    ]
    world = given(
        *FROZEN, *adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1"), *lost,
        TrainerRestored(scenario=MATH, load_id=L(0), candidate=NO_LORA[MATH]),
    ).then()  # fmt: skip
    assert bases(world) == (NO_LORA[MATH], "c1")


def test_a_rollback_brings_its_own_scenario_back_and_no_other() -> None:
    world = given(*THREE_ROLLED_BACK).then()
    assert facts_of(trainer_owes(world)) == [TrainerRestored(scenario=MATH, load_id=L(4), candidate="m1")]
    assert world.publications.adapters[CODE].load_id == L(2)


# -- a target


def test_a_target_of_an_adapter_names_all_that_take_part_and_stops_nobody() -> None:
    state = given(*FROZEN, *adapter_trained(MATH, "m1"))
    event = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(event, TargetPersisted)
    assert (event.scenario, event.sender, event.transport, event.mode) == (MATH, "artifact", "files", "staged")
    assert (event.load_id, event.parent, event.lora, event.members) == (L(1), L(0), LORA, (E0, E1))
    state.when(event).then(counts)
    assert state.world.publications.open is not None


def test_the_targets_of_two_scenarios_come_one_after_the_other_under_load_ids_of_one_row() -> None:
    both = (*adapter_trained(MATH, "m1"), *adapter_trained(CODE, "c1"))
    state = given(*FROZEN, *both, *adapter_released(MATH, 1, "m1", E0, E1))
    event = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(event, TargetPersisted)
    assert (event.scenario, event.load_id, event.parent, event.candidate) == (CODE, L(2), L(0), "c1")


def crowded(*more: Step) -> tuple[Step, ...]:
    """Both engines have room for two, and hold two scenarios' heads."""
    small = tuple(replace(e, adapters=2) if getattr(e, "adapters", 0) == 3 else e for e in FROZEN)  # type: ignore[type-var]
    return (*small, *TWO, *adapter_trained(MATH, "m2", "m1"), *more)


def test_without_room_a_candidate_is_refused_before_anybody_hears_of_it() -> None:
    state = given(*crowded())
    found = facts_of(publisher_debts(state.world, state.now))
    assert [(type(e), e.reason, e.scenario) for e in found] == [(PublicationRefused, "adapter_capacity", MATH)]  # type: ignore[attr-defined]
    assert "room for 3" in found[0].detail  # type: ignore[attr-defined]
    world = given(*crowded(found[0])).then()
    assert publisher_debts(world, state.now) == [] and world.publications.open is None
    assert answers(world, "e0") == {MATH: f"{L(1)} {name(MATH, 1)}", CODE: f"{L(2)} {name(CODE, 2)}"}
    assert owes(world, "e0") is None


@pytest.mark.parametrize("engine", [joined("e2"), replace(joined_with("e2"), accepts=("tcp",))], ids=["none", "tcp"])
def test_an_engine_that_takes_no_adapters_from_files_has_the_candidate_refused(engine: Step) -> None:
    state = given(*FROZEN, engine, holds("e2", 0, "base"), *adapter_trained(MATH, "m1"))
    found = facts_of(publisher_debts(state.world, state.now))
    assert [(e.reason, e.candidate) for e in found] == [("adapters", "m1")]  # type: ignore[attr-defined]


def test_a_target_that_is_another_adapter_than_was_registered_is_a_contradiction() -> None:
    wrong = replace(adapter_target(MATH, 1, "m1", E0), lora=replace(LORA, rank=9))
    given(*FROZEN, *adapter_trained(MATH, "m1")).when(wrong).then(contradicts("names adapter"))
    given(*FROZEN, *adapter_trained(MATH, "m1")).when(adapter_target(CODE, 1, "m1", E0)).then(contradicts("is of math"))


# -- what a member owes


def test_a_member_loads_the_target_and_nobody_answers_with_it_before_the_commit() -> None:
    begun = (*FROZEN, *adapter_trained(MATH, "m1"), adapter_target(MATH, 1, "m1", E0, E1))
    assert owes(given(*begun).then(), "e0") == load(MATH, 1, "m1", "pub1")
    staged = (*begun, adapter_staged("e0", MATH, 1, "m1"))
    world = given(*staged).then()
    assert owes(world, "e0") is None and answers(world, "e0") == {MATH: L(0), CODE: L(0)}
    state = given(*staged, adapter_staged("e1", MATH, 1, "m1"))
    commit = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(commit, ReleaseCommitted) and {e.boot for e in commit.evidence} == {"e0.1", "e1.1"}
    state.when(commit).then(counts)
    assert answers(state.world, "e1") == {MATH: f"{L(1)} {name(MATH, 1)}", CODE: L(0)}


def test_a_commit_without_a_member_is_a_contradiction() -> None:
    begun = (*FROZEN, *adapter_trained(MATH, "m1"), adapter_target(MATH, 1, "m1", E0, E1))
    state = given(*begun, adapter_staged("e0", MATH, 1, "m1"))
    state.when(adapter_committed(MATH, 1, "m1", E0, E1)).then(contradicts("e1 boot e1.1 reported nothing"))


THIRD = (*adapter_trained(CODE, "c2", "c1"), adapter_target(CODE, 4, "c2", E0, E1, parent=2))


def test_what_may_go_is_unloaded_first_and_that_is_the_oldest_that_is_no_head() -> None:
    world = given(*FROZEN, *THREE, *THIRD).then()
    assert owes(world, "e0") == UnloadAdapter(name(MATH, 1))
    world = given(*FROZEN, *THREE, *THIRD, unloaded("e0", name(MATH, 1))).then()
    assert owes(world, "e0") == load(CODE, 4, "c2", "pub4")


def test_what_leaked_goes_before_what_is_only_old() -> None:
    four = tuple(replace(e, adapters=4) if getattr(e, "adapters", 0) == 3 else e for e in FROZEN)  # type: ignore[type-var]
    newer = (*adapter_trained(MATH, "m3", "m2"), *adapter_released(MATH, 4, "m3", E0, E1, parent=3))
    begun = (*four, *THREE, *newer, *adapter_trained(CODE, "c2", "c1"))
    world = given(*begun, leaked("e0", name(MATH, 3)), adapter_target(CODE, 5, "c2", E0, E1, parent=2)).then()
    assert owes(world, "e0") == UnloadAdapter(name(MATH, 3))
    assert owes(world, "e1") == UnloadAdapter(name(MATH, 1))


def test_what_leaked_under_the_name_itself_goes_before_anything_else() -> None:
    begun = (*FROZEN, *THREE, *THIRD, unloaded("e0", name(MATH, 1)), adapter_failed("e0", CODE, 4))
    again = of(CODE, aborted(4, 1, E0, E1))
    assert owes(given(*begun, *again).then(), "e0") == UnloadAdapter(name(CODE, 4))


def test_what_cannot_be_unloaded_fails_the_attempt_and_the_boot_that_alone_cannot_is_out() -> None:
    begun = (*FROZEN, *THREE, *THIRD, leaked("e0", name(MATH, 1)))
    failure = owes(given(*begun).then(), "e0")
    assert isinstance(failure, ReceiverFailed)
    assert (failure.cause, failure.scenario, failure.adapter, failure.staged) == ("eviction", CODE, name(CODE, 4), True)
    state = given(*begun, failure, unloaded("e1", name(MATH, 1)), adapter_staged("e1", CODE, 4, "c2"))
    found = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(found, TransferAborted) and (found.excluded, found.members) == ((E0,), (E1,))


def test_where_nobody_can_nobody_is_out_and_what_leaked_is_tried_again() -> None:
    begun = [*FROZEN, *THREE, *THIRD]
    for engine in ("e0", "e1"):
        begun.append(leaked(engine, name(MATH, 1)))
        begun.append(owes(given(*begun).then(), engine))  # type: ignore[arg-type]
    state = given(*begun)
    found = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(found, TransferAborted) and (found.excluded, found.members) == ((), (E0, E1))
    state.when(found)
    assert owes(state.world, "e0") == UnloadAdapter(name(CODE, 4))


# -- late joiners


def test_a_boot_that_comes_in_the_middle_owes_the_heads_first_and_the_publication_if_it_is_a_member() -> None:
    again = (by("e1.2", joined_with("e1")), holds("e1", 0, "base"))
    begun = [*FROZEN, *TWO, *adapter_trained(MATH, "m2", "m1"), adapter_target(MATH, 3, "m2", E0, E1, parent=1), *again]
    assert owes(given(*begun).then(), "e1", "e1.2") == load(MATH, 1, "m1")
    begun += [adapter_caught_up("e1", MATH, 1, "m1")]
    assert owes(given(*begun).then(), "e1", "e1.2") == load(CODE, 2, "c1")
    begun += [adapter_caught_up("e1", CODE, 2, "c1")]
    world = given(*begun).then()
    assert owes(world, "e1", "e1.2") is None and answers(world, "e1")[MATH] == f"{L(1)} {name(MATH, 1)}"
    begun += of(MATH, aborted(3, 1, E0, m("e1", 2), excluded=(E1,)))
    found = owes(given(*begun).then(), "e1", "e1.2")
    assert found == replace_attempt(load(MATH, 3, "m2", "pub3"), 2)


def replace_attempt(effect: LoadAdapter, attempt: int) -> LoadAdapter:
    return replace(effect, attempt=attempt)


def test_a_boot_that_was_no_member_owes_the_new_head_after_the_commit() -> None:
    again = (by("e1.2", joined_with("e1")), holds("e1", 0, "base"), adapter_caught_up("e1", MATH, 1, "m1"))
    begun = (*FROZEN, *ONE, *adapter_trained(MATH, "m2", "m1"), adapter_target(MATH, 2, "m2", E0, E1, parent=1))
    alone = (*of(MATH, aborted(2, 1, E0, excluded=(E1,))), adapter_staged("e0", MATH, 2, "m2", 2))
    done = adapter_committed(MATH, 2, "m2", E0, attempt=2, parent=1)
    world = given(*begun, *alone, *again, done).then()
    assert owes(world, "e1", "e1.2") == load(MATH, 2, "m2")
    assert answers(world, "e1") == {MATH: None, CODE: L(0)}
    assert answers(world, "e0")[MATH] == f"{L(2)} {name(MATH, 2)}"


def test_what_a_boot_finds_in_its_engine_is_no_proof_and_goes_before_it_is_loaded_anew() -> None:
    again = (by("e1.2", joined_with("e1", 3, (name(MATH, 1),))), holds("e1", 0, "base"))
    world = given(*FROZEN, *ONE, *again).then()
    assert answers(world, "e1") == {MATH: None, CODE: L(0)}
    assert owes(world, "e1", "e1.2") == UnloadAdapter(name(MATH, 1))
    world = given(*FROZEN, *ONE, *again, unloaded("e1", name(MATH, 1))).then()
    assert owes(world, "e1", "e1.2") == load(MATH, 1, "m1")


def test_who_cannot_make_room_for_a_head_leaves() -> None:
    again = (by("e1.2", joined_with("e1", 3, (name(MATH, 1),))), holds("e1", 0, "base"))
    world = given(*FROZEN, *ONE, *again, leaked("e1", name(MATH, 1))).then()
    found = owes(world, "e1", "e1.2")
    assert isinstance(found, EngineLeft) and name(MATH, 1) in found.reason


def test_the_base_model_comes_before_every_adapter() -> None:
    world = given(*FROZEN, *ONE, by("e1.2", joined_with("e1"))).then()
    assert type(owes(world, "e1", "e1.2")).__name__ == "VerifyHead"


def test_a_head_that_is_rolled_back_is_not_loaded_first_for_it_may_be_what_nobody_can_load() -> None:
    """Every boot would leave over it, and what the person asked for would reach none."""
    asked = len((*ROLLBACK[:-1], *AGAIN)) + 1
    back = adapter_target(MATH, 4, "m1", m("e1", 2), parent=3, request=asked)
    state = given(*ROLLBACK[:-1], *AGAIN)
    assert owes(state.world, "e1", "e1.2") == load(MATH, 3, "m2")
    begun = (*ROLLBACK[:-1], *AGAIN, ROLLBACK[-1], back)
    assert owes(given(*begun).then(), "e1", "e1.2") == load(MATH, 4, "m1", "pub4")
    staged = by("e1.2", adapter_staged("e1", MATH, 4, "m1"))
    assert owes(given(*begun, staged).then(), "e1", "e1.2") is None
    assert owes(given(*begun, halted(4)).then(), "e1", "e1.2") == load(MATH, 3, "m2")


# -- a log that goes on, audited


def test_a_log_of_adapters_that_goes_on_is_audited_from_its_start() -> None:
    """With the heads that its predecessor left, whatever they are, and what may be brought back of what was before."""
    start = start_of_log(*FROZEN, *THREE)
    heads = adapter_caught_up("e0", MATH, 3, "m2"), adapter_caught_up("e0", CODE, 2, "c1")
    begun = (first(start), trainer_joined(), joined_with("e0"), holds("e0", 0, "base"), *heads)
    asked = start.seq + len(begun) + 1
    word = Evidence("e0", "e0.1", asked + 2, digest("m1"))
    back = (
        adapter_rollback_asked(MATH, 1, 3),
        adapter_target(MATH, 4, "m1", E0, parent=3, request=asked),
        adapter_staged("e0", MATH, 4, "m1"),
        replace(adapter_committed(MATH, 4, "m1", E0, parent=3), evidence=(word,)),
    )
    to_none = adapter_target(CODE, 5, NO_LORA[CODE], E0, parent=2, request=asked + len(back))
    rest = (*begun, *back, adapter_rollback_asked(CODE, 0, 2), to_none)
    assert audited(start, *rest).violations == ()
    wrong = audited(start, *begun, *back[:1], replace(back[1], parent=L(1)))
    assert {"fold", 5} <= {violation.invariant for violation in wrong.violations}


# -- lost adapters


def test_what_the_engine_does_not_list_any_more_is_told_and_a_head_is_loaded_again() -> None:
    world = given(*FROZEN, *ONE).then()
    lost = name(MATH, 1)
    gone = owes(world, "e0", lost=(lost,))
    assert gone == AdapterUnloaded(engine="e0", adapter=lost, detail="the engine does not list it")
    world = given(*FROZEN, *ONE, gone).then()  # type: ignore[arg-type]
    assert answers(world, "e0")[MATH] is None and owes(world, "e0", lost=(lost,)) == load(MATH, 1, "m1")


def test_what_is_gone_because_it_was_to_go_is_unloaded_and_not_lost() -> None:
    full = given(*FROZEN, *THREE, *adapter_trained(CODE, "c2", "c1"), adapter_target(CODE, 4, "c2", E0, E1, parent=2))
    oldest = UnloadAdapter(name(MATH, 1))
    assert owes(full.then(), "e0") == oldest == owes(full.then(), "e0", lost=(name(MATH, 1),))


def test_what_was_never_there_is_not_lost() -> None:
    assert owes(given(*FROZEN, *ONE).then(), "e0", lost=(name(CODE, 1),)) is None


# -- rollbacks

ROLLBACK = (*FROZEN, *THREE, adapter_rollback_asked(MATH, 1, 3))
ASKED = len(ROLLBACK)
ALIAS: tuple[Step, ...] = (
    adapter_target(MATH, 4, "m1", E0, E1, parent=3, request=ASKED),
    adapter_staged("e0", MATH, 4, "m1", adapter=name(MATH, 1)),
    adapter_staged("e1", MATH, 4, "m1", adapter=name(MATH, 1)),
    adapter_committed(MATH, 4, "m1", E0, E1, parent=3),
)
THREE_ROLLED_BACK = (*ROLLBACK, *ALIAS)
AGAIN: tuple[Step, ...] = (
    by("e1.2", joined_with("e1")),
    by("e1.2", holds("e1", 0, "base")),
    by("e1.2", adapter_caught_up("e1", CODE, 2, "c1")),
)
"""A new boot that holds everything but the head of math."""


def test_a_rollback_to_bytes_that_are_there_is_a_proof_and_no_load() -> None:
    state = given(*ROLLBACK)
    event = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(event, TargetPersisted) and (event.load_id, event.candidate) == (L(4), "m1")
    state.when(event).then(counts)
    assert owes(state.world, "e0") == load(MATH, 4, "m1", event.publication, held_as=name(MATH, 1))
    world = given(*THREE_ROLLED_BACK).then()
    assert answers(world, "e0") == {MATH: f"{L(4)} {name(MATH, 1)}", CODE: f"{L(2)} {name(CODE, 2)}"}


def test_a_rollback_to_release_0_publishes_the_adapter_that_changes_nothing() -> None:
    state = given(*FROZEN, *ONE, adapter_rollback_asked(MATH, 0, 1))
    event = facts_of(publisher_debts(state.world, state.now))[0]
    assert isinstance(event, TargetPersisted)
    assert (event.scenario, event.candidate, event.load_id, event.parent) == (MATH, NO_LORA[MATH], L(2), L(1))
    state.when(event).then(counts)


def test_the_base_model_itself_is_not_rolled_back_and_no_scenario_to_anothers_release() -> None:
    state = given(*FROZEN, *TWO, rollback_asked(0, 0), adapter_rollback_asked(MATH, 2, 1))
    found = facts_of(publisher_debts(state.world, state.now))
    assert [(e.reason, e.request) for e in found] == [
        ("frozen", state.world.seq - 1),
        ("unknown_release", state.world.seq),
    ]  # type: ignore[attr-defined]


OTHERS = (*FROZEN, *THREE, *adapter_trained(CODE, "c2", "c1"), adapter_target(CODE, 4, "c2", E0, E1, parent=2))


def test_a_rollback_halts_its_own_scenarios_publication_and_waits_for_anothers() -> None:
    state = given(*OTHERS, adapter_rollback_asked(MATH, 1, 3))
    assert publisher_debts(state.world, state.now) == []
    own = (*FROZEN, *TWO, *adapter_trained(MATH, "m2", "m1"), adapter_target(MATH, 3, "m2", E0, E1, parent=1))
    state = given(*own, adapter_rollback_asked(MATH, 0, 1))
    found = facts_of(publisher_debts(state.world, state.now))
    assert [(type(e), e.scenario, e.reason) for e in found] == [(PublicationHalted, MATH, "rollback")]  # type: ignore[attr-defined]


def test_a_rollback_that_will_have_room_once_the_open_publication_has_ended_is_not_refused() -> None:
    """There is room for three: two heads, and what is being published, of this scenario or of another one."""
    begun = (*FROZEN, *TWO)
    for scenario, candidate, base in ((MATH, "m2", "m1"), (CODE, "c2", "c1")):
        parent = 1 if scenario == MATH else 2
        open_ = (
            *adapter_trained(scenario, candidate, base),
            adapter_target(scenario, 3, candidate, E0, E1, parent=parent),
        )
        state = given(*begun, *open_, adapter_rollback_asked(MATH, 0, 1))
        found = [type(e) for e in facts_of(publisher_debts(state.world, state.now))]
        assert found == ([PublicationHalted] if scenario == MATH else [])
        assert not any(asked.refused for asked in state.world.requests.values())


# -- words that are not true


OPEN = (*FROZEN, *adapter_trained(MATH, "m1"), adapter_target(MATH, 1, "m1", E0, E1))


@pytest.mark.parametrize(
    "word",
    [
        adapter_staged("e0", MATH, 1, "m1", manifest=digest("other")),
        adapter_staged("e0", MATH, 1, "m1", adapter=name(CODE, 1)),
        adapter_staged("e0", CODE, 1, "m1"),
        adapter_staged("e0", MATH, 7, "m1"),
    ],
    ids=["another digest", "another name", "another scenario", "no such load id"],
)
def test_a_word_that_proves_nothing_is_of_something_that_nobody_may_use(word: Step) -> None:
    world = given(*OPEN, word).then()
    residency = world.membership.engines["e0"].residency
    assert residency is not None and residency.slots[word.adapter].leaked  # type: ignore[union-attr]
    assert not any(slot.load_ids for slot in residency.slots.values())

    assert answers(world, "e0")[MATH] == L(0)


def test_a_commit_on_a_word_of_another_digest_is_a_contradiction() -> None:
    words = adapter_staged("e0", MATH, 1, "m1", manifest=digest("other")), adapter_staged("e1", MATH, 1, "m1")
    given(*OPEN, *words).when(adapter_committed(MATH, 1, "m1", E0, E1)).then(contradicts("e0 boot e0.1 reported"))


def test_a_word_on_a_load_id_that_was_halted_leaves_something_that_must_go() -> None:
    world = given(*OPEN, *of(MATH, halted(1)), adapter_staged("e0", MATH, 1, "m1")).then()
    residency = world.membership.engines["e0"].residency
    assert residency is not None and residency.slots[name(MATH, 1)].leaked
    assert answers(world, "e0")[MATH] == L(0)


def test_a_late_word_on_bytes_that_are_the_heads_takes_nothing_from_the_head() -> None:
    """A rollback to the head itself is halted while an engine is proving it again: it goes on with what it holds."""
    asked = (*FROZEN, *ONE, adapter_rollback_asked(MATH, 1, 1))
    open_ = adapter_target(MATH, 2, "m1", E0, E1, parent=1, request=len(asked))
    late = adapter_staged("e0", MATH, 2, "m1", adapter=name(MATH, 1))
    world = given(*asked, open_, *of(MATH, halted(2)), late).then()
    assert answers(world, "e0")[MATH] == f"{L(1)} {name(MATH, 1)}" and owes(world, "e0") is None


def test_a_rollback_of_a_scenario_that_is_not_there_yet_is_none_of_the_whole_model() -> None:
    state = given(*SERVING, adapter_rollback_asked(MATH, 0, 0))
    found = facts_of(publisher_debts(state.world, state.now))
    assert [(type(e), e.reason) for e in found] == [(PublicationRefused, "unknown_scenario")]  # type: ignore[attr-defined]
