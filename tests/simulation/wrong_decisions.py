"""Wrong decisions: the core's rules broken one at a time: publishers, people, the trainer, readers, the supervisor.

Knows: pieces of the core, and what would be wrong instead of each. Must not know: how a breakage comes to light.
"""

from __future__ import annotations

from tests.simulation import test_histories as histories
from tests.simulation.deployment import Shape
from tests.simulation.patching import Edit
from tests.simulation.searches import FLEET, Breakage, history, supervised, under

PUBLISHER = "reef_bus.core.reactions.publisher:"
TRAINER = "reef_bus.core.reactions.trainer:"
WORLD = "reef_bus.core.world:"
VOID = "reef_bus.core.void:"
RECOVERY = "reef_bus.core.recovery:"

READERS_BELIEVE = Edit(WORLD + "fold", "        _check(world, recorded)\n", "")
"""No reader checks anything: what is wrong is on the log and counts, and only the judges are left to see it."""
ALONE = Shape(engines=1)
COMMITS_EARLY = Edit(
    PUBLISHER + "_drive",
    "if len(verified) == len(open_.members):\n        return [_commit(world, open_)]",
    "if verified:\n        return [_commit(world, msgspec.structs.replace(open_, members=tuple(verified)))]",
)
TAKES_ANY = Edit(
    PUBLISHER + "_next_target",
    "    if not world.queue:\n        return []\n    candidate = world.training.candidates[world.queue[0]]\n",
    "    pending = [c for c in world.training.candidates if c not in world.publications.ended]\n"
    "    if not pending:\n        return []\n    candidate = world.training.candidates[pending[0]]\n",
)
NO_BASE_IS_LOST = Edit(PUBLISHER + "_next_target", "if not reaches_head(world, candidate.id):", "if False:")

DECISIONS = (
    Breakage(
        "empty-membership",
        "a target is persisted although no engine can take part",
        (Edit(PUBLISHER + "_next_target", "if not members:", "if False:"),),
        under(ALONE, crash=1.5),
    ),
    Breakage(
        "commit-before-all",
        "a release is committed as soon as one member has verified",
        (COMMITS_EARLY,),
    ),
    Breakage(
        "commit-before-all-believed",
        "the same, and every reader believes it",
        (COMMITS_EARLY, READERS_BELIEVE),
    ),
    Breakage(
        "undecided-published",
        "a candidate is published before anybody selected it",
        (TAKES_ANY,),
    ),
    Breakage(
        "undecided-published-believed",
        "the same, and every reader believes it",
        (TAKES_ANY, READERS_BELIEVE),
    ),
    Breakage(
        "lost-base-published",
        "a candidate whose base can never be the head is published and not refused",
        (NO_BASE_IS_LOST,),
        under(Shape(eager=True, jobs=4), crash=0.5, corrupt=0.5, pause=0.5, no_room=0.3),
    ),
    Breakage(
        "lost-base-published-believed",
        "the same, and every reader believes it",
        (NO_BASE_IS_LOST, READERS_BELIEVE),
        under(Shape(eager=True, jobs=4), crash=0.5, corrupt=0.5, pause=0.5, no_room=0.3),
    ),
    Breakage(
        "load-id-reused",
        "the load id of a halted publication is given to the next one",
        (
            Edit(
                PUBLISHER + "_next_load_id",
                "world.publications.sequence + 1",
                "len(world.publications.releases)",
            ),
            READERS_BELIEVE,
        ),
        under(no_room=0.5),
    ),
    Breakage(
        "wrong-order",
        "the newest candidate is taken first, and not the oldest",
        (Edit(PUBLISHER + "_next_target", "[world.queue[0]]", "[world.queue[-1]]"),),
        FLEET,
    ),
    Breakage(
        "superseded-by-a-stranger",
        "under `publish: latest` any other candidate supersedes one, also what was not trained from it",
        (
            Edit(
                PUBLISHER + "_successor",
                "known[c].base == candidate",
                "c != candidate",
            ),
        ),
        FLEET,
    ),
    Breakage(
        "guilty-stay",
        "whoever did not verify where another member did is asked again, and not excluded",
        (
            Edit(
                PUBLISHER + "_unverified",
                "return [m for m in members if m not in verified] if verified else []",
                "return []",
            ),
        ),
        history(histories.test_a_receiver_that_holds_something_else_is_never_counted_whatever_it_says, "corrupt"),
    ),
    Breakage(
        "attempts-without-end",
        "a publication that fails is tried again for ever",
        (Edit(PUBLISHER + "_abort", "again = open_.attempt < MAX_ATTEMPTS", "again = True"),),
    ),
    Breakage(
        "no-fence-deadline",
        "a member that does not stop is waited for without end",
        (Edit(PUBLISHER + "_verdict", "if unfenced and now >", "if False and now >"),),
        shielded="who does not stop is mostly silent too, and excluded for that: see `dead-engine-waited-for`, "
        "without both; a unit test of the publisher holds it",
    ),
    Breakage(
        "no-verify-deadline",
        "a member that does not verify is waited for without end",
        (Edit(PUBLISHER + "_receivers", "if now > began", "if False and now > began"),),
        shielded="a transfer without progress ends by its own deadline and is reported, a silent member is "
        "excluded; a unit test of the publisher holds it",
    ),
    Breakage(
        "rollback-over-an-open-publication",
        "a rollback does not halt the publication that is open; nor do readers void a second one",
        (
            Edit(PUBLISHER + "publisher", "    if open_:\n", "    if open_ and not rollback:\n"),
            Edit(VOID + "_nothing_is_open", 'if tail.open else ""', 'if False else ""'),
        ),
        FLEET,
    ),
    Breakage(
        "rollback-to-another-content",
        "a rollback brings back the head's content, and not that of the release which was asked for",
        (
            Edit(
                PUBLISHER + "_rollback",
                "world.training.candidates[release.candidate]",
                "world.training.candidates[world.publications.head.candidate]",
            ),
            READERS_BELIEVE,
        ),
        FLEET,
    ),
    Breakage(
        "rollback-on-a-moved-head",
        "a rollback is made although the head that it was decided on has moved",
        (
            Edit(WORLD + "_moved", 'return "" if asked.head ==', 'return "" if True or asked.head =='),
            READERS_BELIEVE,
        ),
        FLEET,
    ),
    Breakage(
        "answered-twice",
        "a request that was answered stays open",
        (Edit("reef_bus.core.requests:answered", 'pending.pop(getattr(event, "request", 0), None)', "pass"),),
        FLEET,
    ),
    Breakage(
        "ambiguous-retrained",
        "a job that nobody knows the state of is started again without a person",
        (Edit(TRAINER + "_start", "if job.ambiguous and restore is None:", "if False:"),),
        FLEET,
    ),
    Breakage(
        "ambiguity-denied",
        "a job whose boot died in the middle of a step in place is simply tried again",
        (Edit(TRAINER + "_start", "if job.in_place and not job.ambiguous:", "if False:"),),
        FLEET,
    ),
    Breakage(
        "second-job",
        "a job is dispatched while one is open, and readers do not void it",
        (
            Edit(
                TRAINER + "trainer",
                "*_job(world, me, scenarios, colocate)]",
                "*_job(world, me, scenarios, colocate), "
                '*(_next_job(world, ("",), colocate) if world.training.job else [])]',
            ),
            Edit(VOID + "_nothing_is_open", 'if tail.open else ""', 'if False else ""'),
        ),
        FLEET,
    ),
    Breakage(
        "no-restore",
        "the trainer goes on from a base that is lost without saying that it returned to the head",
        (Edit(TRAINER + "_next_job", "if not can_still_reach(world, training.based(scenario)):", "if False:"),),
        FLEET,
        shielded="the base of the next job is chosen by the same rule; `TrainerRestored` is the word that says so "
        "to readers; a unit test of the trainer holds it",
    ),
    Breakage(
        "trained-from-a-lost-base",
        "the next job starts from the trainer's last candidate, whatever became of it",
        (
            Edit(
                TRAINER + "_base",
                "return next(queue, head.candidate)",
                "return world.training.selected[-1] if world.training.selected else head.candidate",
            ),
        ),
        FLEET,
        shielded="its candidate is refused as `base_lost` before anything stops: a job is wasted; a unit test of "
        "the trainer holds the rule",
    ),
    Breakage(
        "prev-ignored",
        "what was stored behind another event than it says counts",
        (Edit(VOID + "why_void", "if recorded.prev != tail.seq:", "if False:"),),
        under(misspelt=0.3, late=0.3),
    ),
    Breakage(
        "old-boots-count",
        "words of a boot that was replaced count",
        (Edit(VOID + "_why_boot", "if not tail.boots or tail.boots[-1] != recorded.boot:", "if False:"),),
        shielded="what an older boot says was chained before its successor joined, so that its `prev` voids it; "
        "who has seen the join retires: see `replaced-boot-goes-on-and-counts`; a unit test of the rule "
        "holds it",
    ),
    Breakage(
        "dead-attempts-count",
        "what closes an attempt that is over closes whatever is open",
        (Edit(VOID + "_attempt_is_open", 'return "" if ok else', 'return "" if True else'),),
        shielded="what closes another attempt was chained before the event that opened this one, so that its "
        "`prev` voids it; a unit test of the rule holds it",
    ),
    Breakage(
        "restart-without-withdrawal",
        "a component that ended is cleaned up without a word that nobody can count on it",
        (
            Edit(
                RECOVERY + "_running",
                "return _withdraw(name, component, _why_ended(seen))",
                'return _debt("clean-up", name, component, CleanUp(name))',
            ),
        ),
        supervised,
    ),
    Breakage(
        "restarts-not-counted",
        "what fails again and again is started again and again",
        (Edit(RECOVERY + "_lost", "if len(recent) <= restarts.max_restarts:", "if True:"),),
        supervised,
    ),
)
