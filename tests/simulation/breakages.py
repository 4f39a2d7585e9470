"""The proof of the proof: the protocol broken in one place, under a name, and the first seed that catches it.

Knows: pieces of the real code, and what would be wrong instead of each. Must not know: how a breakage comes to light; a
seed either ends in a violation or does not. `python -m tests.simulation.breakages --find NAME` looks for seeds anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reef_bus.core.effects import Restarts
from reef_bus.errors import ReefError
from reef_bus.events import ComponentEvent, ComponentLost, Recorded
from tests.fleet import wander
from tests.property.test_recovery_order import LETTERS, in_order
from tests.simulation import test_histories as histories
from tests.simulation.deployment import Deployment, Shape, simulate
from tests.simulation.faults import Faults
from tests.simulation.patching import Edit, broken
from tests.spec import SECOND

CATCHES = Path(__file__).with_name("catches.json")
"""By breakage: the first seed that catches it, and what it finds. Written by `--find`."""
WORKERS, SEEDS, SEED_S = 2, 400, 10.0

Search = Callable[[int], str]
"""What a seed finds: a violation, or an empty string."""


def simulated(faults: Faults | None, shape: Shape | None, seed: int) -> str:
    return simulate(seed, faults, shape).violation


def roamed(seed: int) -> str:
    """The smaller machine, with people who ask for things, trainers in place, and `publish: latest`."""
    return _raised(wander, seed)


def told(history: Callable[..., None], args: tuple[Any, ...], seed: int) -> str:
    """A scripted history, and what it expects of the log."""
    return _raised(history, seed, *args)


def _raised(function: Callable[..., object], *args: Any) -> str:
    """What it says is wrong: its message, or the assertion itself."""
    try:
        function(*args)
    except (AssertionError, ReefError) as error:
        return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return ""


def hasty(seed: int) -> str:
    """An engine that needs nearly as long as it may to stop, and a publisher that sees everything a second late."""

    def script(deployment: Deployment) -> None:
        deployment.when("TargetPersisted", lambda: deployment.pause("engine-0", 1.5))
        deployment.when("TargetPersisted", lambda: setattr(deployment.current("publisher").link, "lag", 1.0))

    found = simulate(seed, Faults(), Shape(jobs=2, thread_s=0.1), script)
    return found.violation or (
        "an engine that kept its deadline is given up" if found.events["TransferAborted"] else ""
    )


def supervised(seed: int) -> str:
    """Processes that crash, and what the log says about each of them: in order, and within the budget of restarts."""
    kept: list[Deployment] = []
    found = simulate(seed, Faults(crash=1.5), Shape(jobs=4), kept.append)
    return found.violation or next(filter(None, map(_wrong_life, _lives(kept[0]))), "")


def _lives(deployment: Deployment) -> Iterator[tuple[str, list[Recorded], Restarts]]:
    """By component: the events about it that count, for every one of them is chained to the one before."""
    log = [each for each in deployment.truth.log if isinstance(each.event, ComponentEvent)]
    for name in deployment.roles:
        yield name, [each for each in log if each.event.component == name], deployment.config.supervision  # type: ignore[attr-defined]


def _wrong_life(life: tuple[str, list[Recorded], Restarts]) -> str:
    name, log, budget = life
    word = "".join(LETTERS.get(each.name, "") for each in log)
    if not in_order(word):
        return f"the events about {name} come in the order {word}"
    failed: list[int] = []
    for each in log:
        failed = [] if each.name == "RecoveryHalted" else failed
        if isinstance(each.event, ComponentLost) and each.event.exit:
            failed = [at for at in failed if at > each.time - budget.window_s * SECOND] + [each.time]
        if each.name == "RestartScheduled" and len(failed) > budget.max_restarts + 1:
            return f"{name} is started again after {len(failed)} failures within {budget.window_s:g} s"
    return ""


def under(shape: Shape | None = None, **rates: float) -> Search:
    return partial(simulated, Faults(**rates), shape)


def history(of: Callable[..., None], *args: Any) -> Search:
    return partial(told, of, args)


DRAWN: Search = partial(simulated, None, None)
FLEET: Search = roamed


class Breakage(NamedTuple):
    """`breaks` says what is not so any more. `shielded`: no seed catches it, and this is why."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    where: Search = DRAWN
    shielded: str = ""


PUBLISHER, TRAINER = "reef_bus.core.reactions.publisher:", "reef_bus.core.reactions.trainer:"
ENGINE, COMMON = "reef_bus.core.reactions.engine:", "reef_bus.core.reactions.common:"
WORLD, VOID, SERVING = "reef_bus.core.world:", "reef_bus.core.void:", "reef_bus.core.serving:"
RECOVERY, RUNNER, AGENT = "reef_bus.core.recovery:", "reef_bus.runner:Runner.", "consumers.reef_engine.agent:Agent."
BOOK, HEARTBEATS = "consumers.reef_trainer.book:RecordBook.", "consumers.reef_publisher.role:Heartbeats."
RECORDER, ROUTER = "consumers.reef_gateway.recorder:Recorder.", "consumers.reef_gateway.router:Router."

READERS_BELIEVE = Edit(WORLD + "fold", "        _check(world, recorded)\n", "")
"""No reader checks anything: what is wrong is on the log and counts, and only the judges are left to see it."""
ALONE = Shape(engines=1)
RETIRES_NOT = Edit(
    ENGINE + "engine",
    "if found is None or found.boot != me.boot:",
    'if found is None or me.boot not in world.tails[f"engine.{me.id}"].boots:',
)

BREAKAGES = (
    # -- publishers
    Breakage(
        "empty-membership",
        "a target is persisted although no engine can take part",
        (Edit(PUBLISHER + "_next_target", "if not members:", "if False:"),),
        under(ALONE, crash=1.5),
    ),
    Breakage(
        "commit-before-all",
        "a release is committed as soon as one member has verified",
        (
            Edit(
                PUBLISHER + "_drive",
                "if len(verified) == len(open_.members):\n        return [_commit(world, open_)]",
                "if verified:\n        return [_commit(world, msgspec.structs.replace(open_, members=tuple(verified)))]",
            ),
        ),
    ),
    Breakage(
        "commit-before-all-believed",
        "the same, and every reader believes it",
        (
            Edit(
                PUBLISHER + "_drive",
                "if len(verified) == len(open_.members):\n        return [_commit(world, open_)]",
                "if verified:\n        return [_commit(world, msgspec.structs.replace(open_, members=tuple(verified)))]",
            ),
            READERS_BELIEVE,
        ),
    ),
    Breakage(
        "undecided-published",
        "a candidate is published before anybody selected it",
        (
            Edit(
                PUBLISHER + "_next_target",
                "for c in world.training.selected if c not in world.publications.ended",
                "for c in world.training.candidates if c not in world.publications.ended",
            ),
        ),
    ),
    Breakage(
        "undecided-published-believed",
        "the same, and every reader believes it",
        (
            Edit(
                PUBLISHER + "_next_target",
                "for c in world.training.selected if c not in world.publications.ended",
                "for c in world.training.candidates if c not in world.publications.ended",
            ),
            READERS_BELIEVE,
        ),
    ),
    Breakage(
        "lost-base-published",
        "a candidate whose base can never be the head is published and not refused",
        (Edit(PUBLISHER + "_next_target", "if not reaches_head(world, candidate.id):", "if False:"),),
        under(Shape(eager=True, jobs=4), crash=0.5, corrupt=0.5, pause=0.5, no_room=0.3),
    ),
    Breakage(
        "lost-base-published-believed",
        "the same, and every reader believes it",
        (Edit(PUBLISHER + "_next_target", "if not reaches_head(world, candidate.id):", "if False:"), READERS_BELIEVE),
        under(Shape(eager=True, jobs=4), crash=0.5, corrupt=0.5, pause=0.5, no_room=0.3),
    ),
    Breakage(
        "load-id-reused",
        "the load id of a halted publication is given to the next one",
        (
            Edit(
                PUBLISHER + "_target",
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
        (Edit(PUBLISHER + "_next_target", "candidate = pending[0]", "candidate = pending[-1]"),),
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
        history(
            histories.test_an_excluded_engine_that_finishes_after_all_counts_for_nothing_and_serves_only_as_another_boot
        ),
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
    ),
    Breakage(
        "no-verify-deadline",
        "a member that does not verify is waited for without end",
        (Edit(PUBLISHER + "_receivers", "if now > began", "if False and now > began"),),
    ),
    Breakage(
        "judged-on-a-stale-fold",
        "a deadline is judged before the stream's head was read",
        (Edit(RUNNER + "_append", "if debt.at_head:", "if False:"),),
        hasty,
    ),
    Breakage(
        "silence-ignored",
        "an engine whose heartbeats stopped is not excluded",
        (Edit(HEARTBEATS + "silent", "self._asked = now", "return frozenset()"),),
    ),
    Breakage(
        "dead-engine-waited-for",
        "an engine that stopped is neither missed by its heartbeats nor by the deadline of its fence",
        (
            Edit(HEARTBEATS + "silent", "self._asked = now", "return frozenset()"),
            Edit(PUBLISHER + "_verdict", "if unfenced and now >", "if False and now >"),
        ),
        history(histories.test_one_dead_engine_costs_one_attempt_and_not_every_candidate),
    ),
    # -- people
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
    # -- the trainer
    Breakage(
        "second-job",
        "a job is dispatched while one is open, and readers do not void it",
        (
            Edit(
                TRAINER + "trainer",
                "*_job(world, me)]",
                "*_job(world, me), *([_next_job(world)] if world.training.job else [])]",
            ),
            Edit(VOID + "_nothing_is_open", 'if tail.open else ""', 'if False else ""'),
        ),
        FLEET,
    ),
    Breakage(
        "no-restore",
        "the trainer goes on from a base that is lost without saying that it returned to the head",
        (Edit(TRAINER + "_next_job", "if not can_still_reach(world, training.base):", "if False:"),),
        FLEET,
    ),
    Breakage(
        "trained-from-a-lost-base",
        "the next job starts from the trainer's last candidate, whatever became of it",
        (
            Edit(
                TRAINER + "_next_job",
                "base = next((c for c in queued if can_still_reach(world, c)), head.candidate)",
                "base = training.selected[-1] if training.selected else head.candidate",
            ),
        ),
        FLEET,
    ),
    Breakage(
        "trained-from-the-newest-state",
        "a job is trained from whatever state the process had last, and not from the base that it names",
        (
            Edit(
                "consumers.reef_trainer.role:Trainer._train",
                "base = self._state(effect.base)",
                "base = list(self._states.values())[-1] if self._states else self._state(effect.base)",
            ),
        ),
    ),
    Breakage(
        "taken-forgotten",
        "which records are consumed above the floor is forgotten by a restart",
        (Edit(BOOK + "_begin", "set(last.taken) if last else set()", "set()"),),
        under(Shape(eager=True, jobs=4), crash=1.5),
    ),
    Breakage(
        "floor-forgotten",
        "below which record all are consumed is forgotten by a restart",
        (Edit(BOOK + "_begin", "last.floor if last else 0", "0"),),
        under(Shape(eager=True, jobs=4), crash=1.5),
    ),
    Breakage(
        "batch-not-spent",
        "the records of the last batch stay in the book",
        (Edit(BOOK + "_begin", "if last:", "if False:"),),
    ),
    # -- readers
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
    ),
    Breakage(
        "dead-attempts-count",
        "what closes an attempt that is over closes whatever is open",
        (Edit(VOID + "_attempt_is_open", 'return "" if ok else', 'return "" if True else'),),
    ),
    # -- the loop
    Breakage(
        "ack-is-success",
        "an acknowledged append is taken to count, unseen",
        (
            Edit(
                RUNNER + "_try",
                "stored = (await self.journal.append(draft, prev)).seq",
                "return bool(await self.journal.append(draft, prev))",
            ),
        ),
    ),
    Breakage(
        "unknown-is-yes",
        "an append without an answer is taken to be stored",
        (
            Edit(
                RUNNER + "_try",
                "# It may be stored, or be stored yet: with the same prev it is the same event, so looking is enough.",
                "return True",
            ),
        ),
    ),
    Breakage(
        "conflict-is-success",
        "an append that conflicted is taken to have been stored before",
        (
            Edit(
                RUNNER + "_try",
                "except Conflict:\n        stored = await self._head()",
                "except Conflict:\n        return True",
            ),
        ),
    ),
    Breakage(
        "said-again-when-it-landed-late",
        "a fact that was given up for lost, and landed since, is said again",
        (Edit(RUNNER + "_try", "if any(tried.values()):  #", "if False:  #"),),
        under(late=0.3, misspelt=0.3),
    ),
    Breakage(
        "performed-again",
        "an effect whose fact did not get through is performed again, and not only said again",
        (Edit(RUNNER + "_write", "await asyncio.sleep(0.01)", "await self._drop([debt.key])"),),
        under(Shape(noisy=True, eager=True, jobs=4), late=0.5),
    ),
    Breakage(
        "asked-before-the-replay",
        "a boot acts before it has folded the log to its head",
        (Edit(RUNNER + "_react", "await self.reached(await self._head())", "pass"),),
    ),
    # -- engines
    Breakage(
        "generates-under-a-fence",
        "the serving rule forgets fences",
        (Edit(SERVING + "may_generate", "        and not fenced(world, engine, boot)\n", ""),),
    ),
    Breakage(
        "head-not-compared",
        "an engine that has proved anything at all may generate",
        (
            Edit(
                SERVING + "holds_head",
                "return head is not None and proof is not None and (proof.load_id, proof.manifest) == (head.load_id, head.manifest)",
                "return head is not None and proof is not None",
            ),
            Edit(AGENT + "may_generate", " and self.proven == head.manifest", ""),
        ),
    ),
    Breakage(
        "trust-survives-a-fence",
        "what an engine proved before its fence counts after a halt, too",
        (
            Edit(
                "reef_bus.core.membership:_fence",
                "engine.fenced, engine.verified = recorded.seq, None",
                "engine.fenced = recorded.seq",
            ),
            Edit(AGENT + "may_generate", " and self.proven == head.manifest", ""),
        ),
        under(Shape(jobs=2), slow=0.9),
    ),
    Breakage(
        "excluded-serves",
        "an excluded boot goes on as if nothing had happened",
        (Edit(SERVING + "live", " and engine.boot not in world.publications.excluded", ""),),
    ),
    Breakage(
        "fence-without-the-memory",
        "an engine says that it has stopped while a batch is being generated",
        (Edit(AGENT + "_fence", "async with self.ingress, self.memory:", "async with self.ingress:"),),
        under(Shape(eager=True, thread_s=0.1)),
    ),
    Breakage(
        "ingress-outlives-its-attempt",
        "a transfer goes on when its attempt is over: nobody ends it, waits for its end, or closes its source",
        (
            Edit("consumers.reef_trainer.role:Trainer._offer", "scope.push_async_callback(offer.close)", "pass"),
            Edit(RUNNER + "_drop", "task.cancel()", "pass"),
            Edit(AGENT + "_receive", "async with self.ingress, self.memory:", "if True:"),
        ),
        under(Shape(jobs=2), slow=0.9),
    ),
    Breakage(
        "hash-kept-over-a-write",
        "the digest of a memory is remembered although it was written to since",
        (
            Edit(AGENT + "_writing", 'self.proven = ""', "pass"),
            Edit(
                AGENT + "_hash",
                "found = await blocking(describe, self.backend.live())",
                "found = self.__dict__.get('kept') if self.proven else await blocking(describe, self.backend.live())\n"
                "    self.kept = found",
            ),
        ),
    ),
    Breakage(
        "receiver-and-readers-compare-nothing",
        "a receiver reports whatever it holds, and readers compare load ids only",
        (
            Edit(AGENT + "_receive", "if found.digest != effect.manifest:", "if False:"),
            Edit(
                WORLD + "agrees",
                "found == (target.load_id, target.manifest, target.mode == STAGED)",
                "found[0] == target.load_id",
            ),
        ),
        under(corrupt=0.3),
    ),
    Breakage(
        "receiver-compares-nothing",
        "a receiver reports whatever it holds, and leaves it to others to compare",
        (Edit(AGENT + "_receive", "if found.digest != effect.manifest:", "if False:"),),
    ),
    Breakage(
        "received-before-all-are-fenced",
        "a receiver begins while another member still generates",
        (Edit(ENGINE + "_attempt", "if all_fenced(world, open_) else []", "if True else []"),),
    ),
    Breakage(
        "replaced-boot-goes-on",
        "a boot whose engine id joined again by another does not retire",
        (RETIRES_NOT,),
        under(twin=1.0),
    ),
    Breakage(
        "replaced-boot-goes-on-and-counts",
        "the same, its words count, and an engine trusts the log alone for what it holds",
        (
            RETIRES_NOT,
            Edit(VOID + "_why_boot", "if not tail.boots or tail.boots[-1] != recorded.boot:", "if False:"),
            Edit(AGENT + "may_generate", " and self.proven == head.manifest", ""),
        ),
        under(twin=1.0),
    ),
    Breakage(
        "dead-sender-believed",
        "the ticket of a trainer boot that was replaced is followed",
        (Edit(COMMON + "word", "if sender is None or sender.boot != world.training.boot:", "if sender is None:"),),
    ),
    Breakage(
        "answer-names-the-newest",
        "an answer names the head as it is when it is done, and not what it was generated with",
        (
            Edit(
                "consumers.reef_engine.server:Server._generate",
                "load_id=load_id,",
                "load_id=world.publications.head.load_id,",
            ),
        ),
        under(Shape(eager=True, thread_s=0.1), pause=1.0, lag=1.0),
    ),
    # -- the gateway
    Breakage(
        "receipt-before-the-record",
        "a receipt is handed out although nobody knows whether the answer was stored",
        (
            Edit(
                RECORDER + "_append",
                'log.warning("%s; trying again", error)',
                "return False",
            ),
        ),
        under(lost=0.1),
    ),
    # -- the supervisor
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


class Catch(NamedTuple):
    seed: int
    violation: str


def attempt(breakage: Breakage, seed: int) -> str:
    """What this seed finds with the protocol broken so."""
    with broken(breakage.edits):
        return breakage.where(seed)


def known() -> dict[str, Catch]:
    return {name: Catch(*catch) for name, catch in json.loads(CATCHES.read_text()).items()}


# -- looking for seeds


class Endless(KeyboardInterrupt):
    """A seed under which the broken protocol spins; no loop and no role takes it for a failure of its own."""


def _spins(*_: object) -> None:
    raise Endless


def find(breakage: Breakage, seeds: Iterable[int]) -> Catch | None:
    """The first seed that catches it, among those that find nothing without it."""
    signal.signal(signal.SIGVTALRM, _spins)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_VIRTUAL, SEED_S)
        try:
            violation = attempt(breakage, seed)
        except Endless:
            continue
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if violation and not breakage.where(seed):
            return Catch(seed, " ".join(violation.split())[:160])
    return None


def _find(task: tuple[str, int]) -> tuple[str, Catch | None]:
    name, seeds = task
    return name, find(next(each for each in BREAKAGES if each.name == name), range(seeds))


def search(names: list[str], seeds: int) -> dict[str, Catch]:
    """Seeds for these, found anew and kept."""
    kept = known() if CATCHES.exists() else {}
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        for name, catch in pool.imap_unordered(_find, [(name, seeds) for name in names]):
            print(
                f"{name:40} {f'{catch.seed:4} {catch.violation}' if catch else 'not caught'}",
                file=sys.stderr,
                flush=True,
            )
            kept.pop(name, None)
            if catch:
                kept[name] = catch
    ordered = {each.name: kept[each.name] for each in BREAKAGES if each.name in kept}
    CATCHES.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.breakages", description=__doc__)
    parser.add_argument("--find", metavar="NAME", action="append", help="look for its first seed anew (`all`: for all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to try for each")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    asked = parser.parse_args()
    names = [each.name for each in BREAKAGES]
    wanted = names if asked.find == ["all"] else asked.find or []
    if unknown := set(wanted) - set(names):
        parser.error(f"no breakage is called {sorted(unknown)}; there are {names}")
    catches = search(wanted, asked.seeds) if wanted else known()
    rows = [(each, catches.get(each.name)) for each in BREAKAGES]
    print(json.dumps(_report(rows)) if asked.json else _table(rows))
    return 1 if any(catch is None and not each.shielded for each, catch in rows) else 0


def _report(rows: list[tuple[Breakage, Catch | None]]) -> list[dict[str, object]]:
    return [
        {
            "name": each.name,
            "breaks": each.breaks,
            "seed": catch and catch.seed,
            "violation": catch and catch.violation,
            "shielded": each.shielded,
        }
        for each, catch in rows
    ]


def _table(rows: list[tuple[Breakage, Catch | None]]) -> str:
    lines = ["| breakage | what is not so any more | seed | what is found |", "|---|---|---|---|"]
    for each, catch in rows:
        found = (str(catch.seed), catch.violation) if catch else ("–", each.shielded or "NOT CAUGHT")
        lines.append(f"| `{each.name}` | {each.breaks} | {found[0]} | {found[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
