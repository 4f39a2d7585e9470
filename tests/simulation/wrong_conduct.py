"""Wrong conduct: the loop, the engines, the trainer's hands and the gateway, each broken in one of its promises.

Knows: pieces of the real code, and what would be wrong instead of each. Must not know: how a breakage comes to light.
"""

from __future__ import annotations

from tests.simulation import test_histories as histories
from tests.simulation.deployment import Shape
from tests.simulation.patching import Edit
from tests.simulation.searches import Breakage, hasty, history, under

PUBLISHER = "reef_bus.core.reactions.publisher:"
ENGINE = "reef_bus.core.reactions.engine:"
COMMON = "reef_bus.core.reactions.common:"
WORLD = "reef_bus.core.world:"
VOID = "reef_bus.core.void:"
SERVING = "reef_bus.core.serving:"
RUNNER = "reef_bus.runner:Runner."
AGENT = "consumers.reef_engine.agent:Agent."
SERVER = "consumers.reef_engine.server:Server."
ENDPOINT = "consumers.reef_engine.endpoint:Endpoint."
BOOK = "consumers.reef_trainer.book:RecordBook."
HEARTBEATS = "consumers.reef_publisher.role:Heartbeats."
RECORDER = "consumers.reef_gateway.recorder:Recorder."

RETIRES_NOT = Edit(
    ENGINE + "engine",
    "if found is None or found.boot != me.boot:",
    'if found is None or me.boot not in world.tails[f"engine.{me.id}"].boots:',
)

CONDUCT = (
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
        shielded="a member that hangs misses the deadline of its fence: see `dead-engine-waited-for`, without both; "
        "a unit test of the publisher's ear holds it",
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
    Breakage(
        "trained-from-the-newest-state",
        "a job is trained from whatever state the process had last, and not from the base that it names",
        (
            Edit(
                "consumers.reef_trainer.role:Trainer.train",
                "base = self._state(effect.base)",
                "base = list(self._states.values())[-1] if self._states else self._state(effect.base)",
            ),
        ),
    ),
    Breakage(
        "taken-forgotten",
        "which records are consumed above the floor is forgotten by a restart",
        (Edit(BOOK + "_take_up", "frozenset(batch.taken)", "frozenset()"),),
        under(Shape(eager=True, jobs=4), crash=1.5),
    ),
    Breakage(
        "floor-forgotten",
        "below which record all are consumed is forgotten by a restart",
        (Edit(BOOK + "_take_up", "batch.floor", "0"),),
        under(Shape(eager=True, jobs=4), crash=1.5),
    ),
    Breakage(
        "batch-not-spent",
        "the records of the last batch stay in the book",
        (Edit(BOOK + "_take_up", "if unit.record in spent", "if False"),),
    ),
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
        shielded="both brokers compare before they acknowledge: only a duplicate of a void event is acknowledged "
        "and does not count, and its writer's next try has another `prev`, hence another id; a unit test "
        "of the runner holds it",
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
        shielded="the void rule lets nothing be opened or closed twice, and of observations the first counts; a "
        "unit test of the runner holds it",
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
        shielded="half a log owes what was owed then: such an append conflicts, and the loop asks again; "
        "judgements about time are asked again at the head; a unit test of the runner holds it",
    ),
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
                " and (proof.load_id, proof.manifest) == (head.load_id, head.manifest)",
                "",
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
        under(Shape(jobs=2, asks=(("PublicationHaltRequested", "SenderReady"),)), slow=0.9),
    ),
    Breakage(
        "excluded-serves",
        "an excluded boot goes on as if nothing had happened",
        (Edit(SERVING + "live", " and engine.boot not in world.publications.excluded", ""),),
    ),
    Breakage(
        "fence-without-the-memory",
        "an engine says that it has stopped while a batch is being generated",
        (Edit(AGENT + "_fence", "async with self.ingress, self._stopped(effect.pause):", "async with self.ingress:"),),
        under(Shape(eager=True, thread_s=0.1)),
    ),
    Breakage(
        "ingress-outlives-its-attempt",
        "a transfer goes on when its attempt is over: nobody ends it, waits for its end, or closes its source",
        (
            Edit("reef_bus.authority:Authority._offer", "scope.push_async_callback(offer.close)", "pass"),
            Edit(RUNNER + "_drop", "task.cancel()", "pass"),
            Edit(AGENT + "_receive", "async with self.ingress, self.memory:", "if True:"),
        ),
        under(Shape(jobs=2, asks=(("PublicationHaltRequested", "SenderReady"),)), slow=0.9),
    ),
    Breakage(
        "hash-kept-over-a-write",
        "what a memory was last found to hold is remembered although it was written to since",
        (
            Edit(AGENT + "_writing", 'self.proven = ""', "pass"),
            Edit(AGENT + "_hash", "self.proven = found.digest", "self.proven, self.kept = found.digest, found"),
            Edit(
                AGENT + "_verify",
                'await self._hash(effect.manifest, effect.load_id), "memory"',
                "self.kept if self.proven else await self._hash(effect.manifest, effect.load_id), 'memory'",
            ),
        ),
        under(Shape(jobs=2, asks=(("PublicationHaltRequested", "SenderReady"),)), slow=0.9),
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
        shielded="publishers and every reader compare the digest that it reports: see `receiver-and-readers-"
        "compare-nothing`; a unit test of the agent holds it",
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
        shielded="its words are void, and it may not generate: see `replaced-boot-goes-on-and-counts`; a unit "
        "test of the engine holds it",
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
        shielded="its door is shut: the attempt fails and the next one has the living boot's ticket; a unit test "
        "of the engine holds it",
    ),
    Breakage(
        "answer-names-the-newest",
        "an answer names the head as it is when it is done, and not what it was generated with",
        (
            Edit(
                SERVER + "_sample",
                "batch.add(found, as_of, agent.world.seq)",
                "batch.go_on(agent.world.publications.head.load_id) or batch.add(found, as_of, agent.world.seq)",
            ),
        ),
        under(Shape(eager=True, thread_s=0.1), pause=1.0, lag=1.0),
    ),
    Breakage(
        "spans-forgotten",
        "an answer that went on in place names only the version that ended it",
        (Edit(ENDPOINT + "answer", "tuple(span for span in spans if span.count) or ", ""),),
        under(Shape(eager=True, pause="in_place", generate_s=0.2)),
    ),
    Breakage(
        "named-by-its-beginning",
        "an answer that went on in place is said to be whole of the version that began it, and only the log is asked",
        (
            Edit(ENDPOINT + "answer", "spans=parts if len(parts) > 1 else (),", "spans=(),"),
            Edit("tests.simulation.truth:Truth.check_answer", "if made !=", "if False and made !="),
        ),
        under(Shape(eager=True, mode="staged", pause="in_place", generate_s=0.2)),
    ),
    Breakage(
        "one-part-across-a-fence",
        "an answer that was stopped by a fence, and went on with the incumbent, says that it was generated in one go",
        (
            Edit(
                ENDPOINT + "answer",
                "spans=parts if len(parts) > 1 else (),",
                "spans=parts if len({span.load_id for span in parts}) > 1 else (),",
            ),
        ),
        under(
            Shape(pause="in_place", generate_s=0.2, eager=True, asks=(("PublicationHaltRequested", "SenderReady"),)),
        ),
    ),
    Breakage(
        "kv-kept-over-retract",
        "a request that is to start over goes on with the tokens and the KV cache that it had",
        (
            Edit(SERVER + "_generate", "batch.retract()", "batch.spans = []"),
            Edit(SERVER + "_part", "if kept and", "if False and kept and"),
        ),
        under(Shape(eager=True, pause="retract", generate_s=0.2)),
    ),
    Breakage(
        "batch-forgets-spans",
        "samples are trained on as if the version that began them had made them whole",
        (Edit(BOOK + "_samples", "spans=unit.spans,", ""),),
        under(Shape(eager=True, pause="in_place", generate_s=0.2)),
    ),
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
)
