"""The rules of LoRA adapter residency, one by one: `rule n` is a row of the rules of LoRA residency that we re-create.

Knows: the facts that change a residency, and the order in which they come. Must not know: engines (test_residency.py of
the property tests has one that errs and lies).
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from reef_bus.core.ids import adapter_name
from reef_bus.core.residency import (
    Drift,
    Refused,
    Residency,
    Room,
    Slot,
    activated,
    alias,
    lease,
    load_failed,
    loaded,
    make_room,
    pin,
    protected,
    reclaim,
    reconcile,
    release,
    release_scenario,
    route,
    served,
    tentative,
    unload_failed,
    unloaded,
    unpin,
    withdrawn,
)
from reef_bus.errors import Rejected

A, B, C = "a", "b", "c"
"""Scenarios."""


def inc(number: int) -> str:
    return f"inc:{number}"


def name(scenario: str, number: int) -> str:
    return adapter_name(scenario, inc(number))


def staged(state: Residency, scenario: str, number: int, manifest: str = "") -> Residency:
    """A target that this boot has proven to hold, whose commit is awaited; `m<number>` unless other bytes are named."""
    manifest = manifest or f"m{number}"
    return loaded(tentative(state, scenario, inc(number), manifest), scenario, inc(number), manifest)


def released(state: Residency, scenario: str, number: int, manifest: str = "") -> Residency:
    return activated(staged(state, scenario, number, manifest), scenario, inc(number))


def holding(capacity: int | None, *releases: tuple[str, int]) -> Residency:
    """A boot that received these releases in turn, and unloaded nothing."""
    state = Residency(capacity=capacity)
    for scenario, number in releases:
        state = released(state, scenario, number)
    return state


def room(state: Residency, scenario: str, number: int, *, supersede: bool = False) -> Room | Refused:
    return make_room(state, scenario, inc(number), f"m{number}", supersede=supersede)


def leased(state: Residency, lease_id: str, scenario: str, number: int) -> Residency:
    found = lease(state, lease_id, scenario, inc(number))
    assert isinstance(found, Residency), found
    return found


def pinned(state: Residency, scenario: str, number: int) -> Residency:
    found = pin(state, name(scenario, number))
    assert isinstance(found, Residency), found
    return found


def refused(found: object, reason: str) -> Refused:
    assert isinstance(found, Refused), found
    assert found.reason == reason, found
    return found


# -- rule 1: capacity


@pytest.mark.parametrize("capacity", [0, -1])
def test_rule_1_a_capacity_is_positive_or_unbounded(capacity: int) -> None:
    with pytest.raises(Rejected, match=f"adapter capacity {capacity}: expected at least 1"):
        Residency(capacity=capacity)


def test_rule_1_without_a_bound_nothing_is_ever_unloaded() -> None:
    state = holding(None, (A, 1), (A, 2), (B, 3), (A, 4))
    assert room(state, C, 5) == Room(name(C, 5))


def test_rule_1_a_refusal_says_what_would_do_a_place_for_each_scenario_and_one_more() -> None:
    found = refused(room(holding(2, (A, 1), (B, 2)), A, 3), "capacity")
    assert found.needed == 3
    assert f"{name(A, 1)}, {name(B, 2)}; scenarios that share it: 2; give it room for 3" in found.detail


def test_rule_1_a_scenario_without_an_adapter_shares_the_engine_too() -> None:
    state = replace(holding(1, (A, 1)), current={A: inc(1), B: inc(0)})
    assert refused(room(state, A, 2), "capacity").needed == 3
    assert refused(room(state, C, 2), "capacity").needed == 4


def test_rule_1_a_refusal_counts_what_pins_and_leases_hold_beside() -> None:
    state = activated(leased(holding(3, (A, 1)), "r1", A, 1), A, inc(2))
    state = released(released(state, A, 3), A, 4)
    assert refused(room(pinned(state, A, 3), A, 5), "capacity").needed == 4  # 1 is leased, 3 pinned, 4 current


# -- rule 3: protected


def test_rule_3_what_is_current_is_protected_and_what_was_current_is_not() -> None:
    state = holding(None, (A, 1), (A, 2))
    assert protected(state, name(A, 2)) and not protected(state, name(A, 1))


def test_rule_3_what_is_pinned_is_protected_until_it_is_unpinned() -> None:
    state = pinned(holding(None, (A, 1), (A, 2)), A, 1)
    assert protected(state, name(A, 1))
    assert not protected(unpin(unpin(state, name(A, 1)), name(A, 1)), name(A, 1))


def test_rule_3_what_is_leased_is_protected_until_the_last_lease_ends() -> None:
    state = leased(leased(holding(None, (A, 1)), "r1", A, 1), "r2", A, 1)
    state = released(state, A, 2)
    assert protected(release(state, "r1"), name(A, 1))
    assert not protected(release(release(state, "r1"), "r2"), name(A, 1))


def test_rule_3_what_a_commit_is_awaited_of_is_protected() -> None:
    state = tentative(holding(None, (A, 1)), B, inc(2), "m2")
    assert protected(state, name(B, 2))
    assert protected(loaded(state, B, inc(2), "m2"), name(B, 2))


def test_rule_3_only_what_is_there_and_proven_can_be_pinned() -> None:
    state = tentative(Residency(), A, inc(1), "m1")
    refused(pin(state, name(A, 1)), "not_resident")
    refused(pin(state, name(A, 9)), "not_resident")
    refused(pin(unload_failed(holding(None, (A, 1)), name(A, 1)), name(A, 1)), "not_resident")


# -- rule 4: who goes first


def test_rule_4_what_was_activated_longest_ago_goes_first_across_scenarios() -> None:
    state = holding(5, (A, 1), (B, 2), (B, 3), (A, 4), (C, 5))
    assert room(state, C, 6) == Room(name(C, 6), (name(A, 1),))
    state = replace(state, capacity=4)
    assert room(state, C, 6) == Room(name(C, 6), (name(A, 1), name(B, 2)))


def test_rule_4_what_leaked_goes_before_everything_else() -> None:
    state = unload_failed(holding(4, (A, 1), (B, 2), (B, 3), (A, 4)), name(B, 2))
    assert room(state, C, 5) == Room(name(C, 5), (name(B, 2),))


def test_rule_4_what_is_protected_is_passed_over() -> None:
    state = holding(4, (A, 1), (B, 2), (B, 3), (A, 4))
    assert room(pinned(state, A, 1), C, 5) == Room(name(C, 5), (name(B, 2),))
    refused(room(pinned(pinned(state, A, 1), B, 2), C, 5), "capacity")


def test_rule_4_a_repeated_activation_is_none_and_moves_nothing_back() -> None:
    state = activated(holding(2, (A, 1), (B, 2)), A, inc(1))
    assert state == holding(2, (A, 1), (B, 2))


def test_rule_4_supersede_gives_up_the_own_current_adapter() -> None:
    state = holding(1, (A, 1))
    refused(room(state, A, 2), "capacity")
    assert room(state, A, 2, supersede=True) == Room(name(A, 2), (name(A, 1),))


def test_rule_4_supersede_never_gives_up_anothers() -> None:
    refused(room(holding(1, (A, 1)), B, 2, supersede=True), "capacity")
    refused(room(holding(2, (A, 1), (B, 2)), C, 3, supersede=True), "capacity")


def test_rule_4_supersede_gives_up_no_pin_and_no_lease() -> None:
    refused(room(pinned(holding(1, (A, 1)), A, 1), A, 2, supersede=True), "capacity")
    refused(room(leased(holding(1, (A, 1)), "r1", A, 1), A, 2, supersede=True), "capacity")


def test_section_3_5_the_own_current_adapter_is_the_last_resort() -> None:
    """Activated before the other scenario's old one, and yet it goes after it."""
    state = holding(3, (A, 1), (B, 2), (B, 3))
    assert room(state, A, 4, supersede=True) == Room(name(A, 4), (name(B, 2),))


# -- rule 5: a load, and what becomes of it


def test_rule_5_a_load_takes_its_place_before_it_happened_and_nobody_may_use_it() -> None:
    state = tentative(holding(2, (A, 1)), A, inc(2), "m2")
    assert served(state, A) == name(A, 1)
    refused(room(state, B, 3), "capacity")
    refused(route(state, A, inc(2)), "not_resident")


def test_rule_5_a_load_that_was_proven_is_not_used_before_its_commit() -> None:
    state = staged(holding(2, (A, 1)), A, 2)
    assert served(state, A) == name(A, 1)
    refused(route(state, A, inc(2)), "not_committed")
    refused(lease(state, "r1", A, inc(2)), "not_committed")


def test_rule_5_a_commit_makes_it_current_and_the_one_before_evictable() -> None:
    state = released(holding(2, (A, 1)), A, 2)
    assert served(state, A) == name(A, 2)
    assert room(state, A, 3) == Room(name(A, 3), (name(A, 1),))


def test_rule_5_once_it_was_loaded_nothing_is_owed_for_it() -> None:
    assert room(staged(holding(2, (A, 1)), A, 2), A, 2) == Room(name(A, 2), held=True)
    assert staged(staged(Residency(), A, 1), A, 1).slots.keys() == {name(A, 1)}


def test_rule_5_room_is_made_for_it_once_and_not_again_for_its_own_place() -> None:
    state = holding(2, (A, 1), (A, 2))
    assert room(state, A, 3) == room(tentative(state, A, inc(3), "m3"), A, 3) == Room(name(A, 3), (name(A, 1),))
    assert room(unloaded(tentative(state, A, inc(3), "m3"), name(A, 1)), A, 3) == Room(name(A, 3))


def test_rule_5_a_failed_load_leaves_the_incumbent_and_is_leaked_until_it_is_known_to_be_gone() -> None:
    state = load_failed(tentative(holding(3, (A, 1)), A, inc(2), "m2"), A, inc(2))
    assert served(state, A) == name(A, 1) and state.slots[name(A, 2)].leaked
    assert unload_failed(state, name(A, 2)).slots[name(A, 2)].leaked
    assert not unloaded(state, name(A, 2)).slots[name(A, 2)].leaked


def test_rule_5_a_failed_load_keeps_its_place_for_the_next_attempt_until_the_target_is_halted() -> None:
    state = load_failed(tentative(holding(2, (A, 1)), A, inc(2), "m2"), A, inc(2))
    refused(room(state, B, 3), "capacity")
    assert room(withdrawn(state, A, inc(2)), B, 3) == Room(name(B, 3), (name(A, 2),))
    assert withdrawn(unloaded(state, name(A, 2)), A, inc(2)).slots[name(A, 2)].leaked, "whatever an engine said"


def test_rule_5_a_failed_catch_up_keeps_a_place_too() -> None:
    state = load_failed(Residency(capacity=2, current={A: inc(1)}), A, inc(1))
    assert state.slots[name(A, 1)].leaked
    refused(route(state, A, inc(1)), "not_resident")


def test_rule_5_what_leaked_is_reclaimed_before_it_is_loaded_again() -> None:
    """An engine refuses a second load under one name; so what leaked goes first, though there is room for more."""
    state = load_failed(tentative(holding(3, (A, 1)), A, inc(2), "m2"), A, inc(2))
    again = tentative(state, A, inc(2), "m2")
    assert again == state
    assert room(again, A, 2) == Room(name(A, 2), (name(A, 2),))
    assert reclaim(again, name(A, 2)) == (name(A, 2),) and reclaim(again, name(A, 1)) == ()
    gone = unloaded(again, name(A, 2))
    assert room(gone, A, 2) == Room(name(A, 2)) and protected(gone, name(A, 2)), "its place stays taken"
    assert served(activated(loaded(gone, A, inc(2), "m2"), A, inc(2)), A) == name(A, 2)


def test_rule_5_what_leaked_and_is_still_in_use_is_not_reclaimed() -> None:
    state = unload_failed(leased(holding(3, (A, 1)), "r1", A, 1), name(A, 1))
    refused(room(state, A, 1), "in_use")
    assert room(release(state, "r1"), A, 1) == Room(name(A, 1), (name(A, 1),))


def test_rule_5_a_halted_target_is_never_used_and_is_the_first_to_go() -> None:
    state = withdrawn(staged(holding(2, (A, 1)), A, 2), A, inc(2))
    refused(route(state, A, inc(2)), "not_resident")
    assert room(state, B, 3) == Room(name(B, 3), (name(A, 2),))


def test_rule_5_a_halted_target_of_others_changes_nothing() -> None:
    state = staged(holding(3, (A, 1)), A, 2)
    assert withdrawn(state, A, inc(3)) == withdrawn(state, B, inc(2)) == state
    assert withdrawn(holding(3, (A, 1)), A, inc(1)) == holding(3, (A, 1)), "what is committed is not withdrawn"


def test_rule_5_a_load_that_nobody_waits_for_any_more_is_leaked() -> None:
    state = loaded(withdrawn(tentative(holding(2, (A, 1)), A, inc(2), "m2"), A, inc(2)), A, inc(2), "m2")
    assert state.slots[name(A, 2)].leaked and served(state, A) == name(A, 1)
    late = loaded(activated(holding(None, (A, 1)), A, inc(3)), A, inc(2), "m2")
    assert late.slots[name(A, 2)].leaked


# -- rule 6: an unload that fails


def test_rule_6_an_unload_that_fails_keeps_its_place_and_is_tried_first_next_time() -> None:
    state = unload_failed(holding(3, (A, 1), (B, 2), (B, 3)), name(B, 2))
    assert room(state, A, 4) == Room(name(A, 4), (name(B, 2),))
    assert room(unloaded(state, name(B, 2)), A, 4) == Room(name(A, 4))


def test_rule_6_a_current_adapter_whose_unload_failed_is_used_no_more() -> None:
    """It was superseded, and then nobody knows: the scenario waits for its next release, or for a load."""
    state = unload_failed(holding(1, (A, 1)), name(A, 1))
    refused(route(state, A, inc(1)), "not_resident")
    refused(lease(state, "r1", A, inc(1)), "not_resident")
    assert room(state, B, 2) == Room(name(B, 2), (name(A, 1),))


# -- rule 7: loads that the state did not see coming


def test_rule_7_a_catch_up_is_registered_by_its_proof() -> None:
    state = loaded(Residency(capacity=2, current={A: inc(1)}), A, inc(1), "m1")
    assert route(state, A, inc(1)) == served(state, A) == name(A, 1)


def test_rule_7_beyond_capacity_it_is_counted_and_everything_over_must_go() -> None:
    state = loaded(replace(holding(1, (A, 1)), current={A: inc(1), B: inc(2)}), B, inc(2), "m2")
    assert state.slots.keys() == {name(A, 1), name(B, 2)}
    state = replace(released(state, A, 3), capacity=2)
    assert refused(room(state, A, 4), "capacity").needed == 3
    assert room(activated(state, B, inc(5)), A, 4) == Room(name(A, 4), (name(A, 1), name(B, 2)))


def test_rule_7_a_proof_of_a_leaked_adapter_reclaims_it() -> None:
    state = unload_failed(Residency(capacity=2, current={A: inc(1)}), name(A, 1))
    assert served(loaded(state, A, inc(1), "m1"), A) == name(A, 1)


def test_a_commit_counts_on_engines_that_do_not_hold_it_too() -> None:
    """Who joined during the publication has the old adapter as one to go, and nothing that a request may name."""
    state = activated(holding(1, (A, 1)), A, inc(2))
    assert served(state, A) == ""
    refused(route(state, A, inc(2)), "not_resident")
    refused(route(state, A, inc(1)), "not_current")
    assert room(state, A, 2) == Room(name(A, 2), (name(A, 1),))


# -- rule 8: aliases


def test_rule_8_a_release_of_bytes_that_are_current_needs_no_load() -> None:
    state = holding(1, (A, 1))
    assert alias(state, A, "m1") == name(A, 1)
    assert make_room(state, A, inc(2), "m1") == Room(name(A, 1), held=True)
    again = released(state, A, 2, "m1")
    assert again.current == {A: inc(2)} and again.slots.keys() == {name(A, 1)}
    assert route(again, A, inc(2)) == route(again, A, inc(1)) == name(A, 1)


def test_rule_8_a_rollback_onto_bytes_that_are_still_resident_needs_no_load() -> None:
    """And they are protected from its target on."""
    state = tentative(holding(2, (A, 1), (A, 2)), A, inc(3), "m1")
    refused(room(state, B, 4), "capacity")
    state = loaded(state, A, inc(3), "m1")
    assert served(state, A) == name(A, 2)
    back = activated(state, A, inc(3))
    assert served(back, A) == route(back, A, inc(3)) == name(A, 1)
    assert room(back, B, 4) == Room(name(B, 4), (name(A, 2),))


def test_rule_8_an_alias_is_not_used_before_its_commit() -> None:
    state = staged(holding(1, (A, 1)), A, 2, "m1")
    refused(route(state, A, inc(2)), "not_committed")
    assert route(state, A, inc(1)) == name(A, 1)


def test_rule_8_an_alias_that_failed_or_was_halted_leaves_the_bytes_as_they_were() -> None:
    before = holding(1, (A, 1))
    for end in (load_failed, withdrawn):
        state = end(staged(before, A, 2, "m1"), A, inc(2))
        assert route(state, A, inc(1)) == name(A, 1)
        refused(route(state, A, inc(2)), "not_resident")
    assert loaded(state, A, inc(2), "m1") == state, "a late word about a halted one changes nothing either"


def test_rule_8_only_the_own_scenarios_proven_bytes_are_aliased() -> None:
    state = holding(None, (A, 1))
    assert alias(state, B, "m1") == "" and alias(state, A, "m2") == ""
    assert make_room(state, B, inc(2), "m1") == Room(name(B, 2))
    assert alias(unload_failed(state, name(A, 1)), A, "m1") == ""
    assert alias(tentative(state, A, inc(2), "m2"), A, "m2") == ""


def test_rule_8_a_proof_of_other_bytes_takes_the_trust_away() -> None:
    state = loaded(tentative(holding(1, (A, 1)), A, inc(2), "m1"), A, inc(2), "m3")
    refused(route(state, A, inc(1)), "not_resident")
    assert state.slots[name(A, 1)].leaked


def test_rule_8_an_aliased_adapter_that_was_lost_is_loaded_again_under_its_name() -> None:
    state = unloaded(tentative(holding(1, (A, 1)), A, inc(2), "m1"), name(A, 1))
    assert make_room(state, A, inc(2), "m1") == Room(name(A, 1))
    state = activated(loaded(state, A, inc(2), "m1"), A, inc(2))
    assert route(state, A, inc(2)) == name(A, 1)


# -- rule 9: leases


def test_rule_9_a_lease_fails_closed_without_a_current_adapter() -> None:
    refused(lease(Residency(), "r1", A, inc(1)), "not_resident")
    refused(lease(Residency(), "r1", A, inc(0)), "not_resident")


def test_rule_9_a_lease_fails_closed_for_a_load_id_that_the_current_adapter_does_not_have() -> None:
    state = holding(None, (A, 1), (A, 2), (B, 3))
    refused(lease(state, "r1", A, inc(1)), "not_current")
    refused(lease(state, "r1", A, inc(3)), "not_resident")
    refused(lease(state, "r1", B, inc(2)), "not_resident")


def test_rule_9_what_drains_gets_no_new_lease() -> None:
    state = released(leased(holding(None, (A, 1)), "r1", A, 1), A, 2)
    assert route(state, A, inc(1)) == name(A, 1)
    refused(lease(state, "r2", A, inc(1)), "not_current")


def test_rule_9_what_has_no_head_any_more_gets_no_new_lease_while_the_last_one_runs() -> None:
    state = release_scenario(leased(holding(None, (A, 1)), "r1", A, 1), A)
    assert route(state, A, inc(1)) == name(A, 1)
    assert refused(lease(state, "r2", A, inc(1)), "not_current").detail == "a: inc:1 is not current; it has no head"


def test_rule_9_a_lease_that_is_taken_or_released_twice_counts_once() -> None:
    once = leased(holding(None, (A, 1)), "r1", A, 1)
    assert leased(once, "r1", A, 1) == once
    assert release(release(once, "r1"), "r1") == release(once, "r1") == holding(None, (A, 1))


def test_rule_9_a_lease_id_is_of_one_adapter() -> None:
    state = leased(holding(None, (A, 1), (B, 2)), "r1", A, 1)
    refused(lease(state, "r1", B, inc(2)), "taken")


# -- rule 10, rule 11


def test_rule_10_a_scenario_that_is_released_leaves_adapters_that_may_go() -> None:
    state = release_scenario(holding(2, (A, 1), (C, 3)), A)
    assert room(state, B, 2) == Room(name(B, 2), (name(A, 1),))
    assert served(state, C) == name(C, 3)
    refused(lease(state, "r1", A, inc(1)), "not_current")
    refused(room(release_scenario(pinned(holding(1, (A, 1)), A, 1), A), B, 2), "capacity")


def test_rule_11_strays_are_unloaded_and_what_the_engine_lost_is_dropped() -> None:
    state = holding(None, (A, 1), (B, 2))
    assert reconcile(state, [name(B, 2), name(A, 9), "l1"]) == Drift(("l1", name(A, 9)), (), (name(A, 1),))
    dropped = unloaded(state, name(A, 1))
    assert dropped.slots.keys() == {name(B, 2)}
    refused(route(dropped, A, inc(1)), "not_resident")


def test_rule_11_a_stray_that_cannot_be_unloaded_takes_a_place_and_is_the_first_to_go() -> None:
    state = load_failed(tentative(holding(4, (A, 1)), A, inc(2), "m2"), A, inc(2))
    state = unload_failed(unload_failed(state, "l1"), name(C, 9))
    assert state.slots["l1"] == Slot(scenario="", manifest="", leaked=True, order=-1)
    assert room(state, B, 3) == Room(name(B, 3), ("l1",))
    assert reconcile(state, state.slots) == Drift((), (), ())


def test_rule_11_a_target_after_a_stray_of_its_name_is_halted_like_any_other() -> None:
    state = tentative(unload_failed(Residency(capacity=1), name(A, 1)), A, inc(1), "m1")
    assert not protected(withdrawn(state, A, inc(1)), name(A, 1))


def test_rule_11_a_stray_in_use_is_leaked_before_it_is_unloaded() -> None:
    """The engine lost it, and loaded it again for a request that still runs."""
    state = unloaded(leased(holding(2, (A, 1)), "r1", A, 1), name(A, 1))
    assert reconcile(state, [name(A, 1)]) == Drift((), (name(A, 1),), ())


def test_rule_11_a_place_for_a_load_to_come_is_not_lost() -> None:
    state = tentative(holding(2, (A, 1)), A, inc(2), "m2")
    assert reconcile(state, [name(A, 1)]) == Drift((), (), ())
    assert reconcile(staged(state, A, 2), [name(A, 1)]) == Drift((), (), (name(A, 2),))


def test_rule_11_of_an_engine_that_holds_nothing_everything_is_lost() -> None:
    state = unload_failed(holding(3, (A, 1), (A, 2)), name(A, 1))
    assert reconcile(state, []) == Drift((), (), (name(A, 1), name(A, 2)))


# -- rule 14: routing


def test_rule_14_a_scenario_without_a_release_is_answered_by_the_frozen_base() -> None:
    assert route(Residency(), A, inc(0)) is None
    assert route(Residency(current={A: inc(0)}), A, inc(0)) is None
    refused(route(holding(None, (B, 1)), A, inc(1)), "not_resident")


def test_rule_14_a_scenario_with_a_release_never_falls_back_to_the_base() -> None:
    state = holding(None, (A, 1))
    refused(route(state, A, inc(0)), "not_current")
    refused(route(unloaded(state, name(A, 1)), A, inc(0)), "not_current")
    refused(route(unloaded(state, name(A, 1)), A, inc(1)), "not_resident")


def test_rule_14_a_request_is_answered_by_the_adapter_that_it_froze_or_not_at_all() -> None:
    state = holding(None, (A, 1), (A, 2))
    assert route(state, A, inc(2)) == name(A, 2)
    refused(route(state, A, inc(1)), "not_current")


def test_rules_2_and_5_one_load_id_in_two_scenarios_is_two_adapters() -> None:
    state = released(holding(None, (A, 1)), B, 1, "m2")
    assert (route(state, A, inc(1)), route(state, B, inc(1))) == (name(A, 1), name(B, 1))
    assert name(A, 1) != name(B, 1)
