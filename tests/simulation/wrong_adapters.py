"""Wrong about adapters: the rules of who holds which, who answers with it and what may go, each broken in one place.

Knows: pieces of the real code, and what would be wrong instead of each. Must not know: how a breakage comes to light.
"""

from __future__ import annotations

from tests.simulation.patching import Edit
from tests.simulation.searches import ADAPTED, Breakage, spoiled, under
from tests.simulation.shape import Shape

PUBLISHER = "reef_bus.core.reactions.publisher:"
TRAINER = "reef_bus.core.reactions.trainer:"
SERVING = "reef_bus.core.serving:"
RESIDENCY = "reef_bus.core.residency:"
OWED = "reef_bus.core.reactions.adapters:"
HELD = "consumers.reef_engine.adapters:Adapters."

TWO = ("math", "code")
CROWDED = under(Shape(adapters=TWO, capacity=2, jobs=6, eager=True))
BUSY = Shape(adapters=TWO, capacity=3, jobs=8, eager=True, generate_s=1.5)
LOST = under(Shape(adapters=TWO, jobs=4), lose=2.0)

ADAPTERS = (
    Breakage(
        "capacity-after-the-target",
        "whether there is room for an adapter is found out by its members, after its target",
        (Edit(PUBLISHER + "_no_room", "if isinstance(found, Refused):", "if False:"),),
        CROWDED,
    ),
    Breakage(
        "head-evicted",
        "an adapter goes although it is the head of another scenario",
        (
            Edit(
                RESIDENCY + "protected",
                "current = slot.scenario != superseding and _is_current(state, slot)",
                "current = False",
            ),
        ),
        CROWDED,
    ),
    Breakage(
        "named-when-staged",
        "requests name an adapter as soon as it is staged, before it is committed",
        (
            Edit(
                SERVING + "version",
                "head = world.publications.head_of(scenario)",
                "open_, held = world.publications.open, engine.residency\n"
                "    head = world.publications.head_of(scenario)\n"
                "    if open_ and open_.lora and open_.scenario == scenario and held:\n"
                "        if name := residency._proven(held, scenario, open_.load_id):\n"
                "            return Version(open_.load_id, name)",
            ),
        ),
        ADAPTED,
    ),
    Breakage(
        "unloaded-under-a-request",
        "an adapter is unloaded while requests in hand name it",
        (Edit(HELD + "unload", "while self._leases[effect.name]:", "while False:"),),
        under(BUSY),
    ),
    Breakage(
        "staged-unproven",
        "an adapter counts as loaded because the engine said so",
        (Edit(HELD + "_loaded", "if proof.flaw:", "if False:"),),
        under(Shape(adapters=TWO, jobs=4), another_load=0.3, skip_load=0.3),
    ),
    Breakage(
        "adapter-committed-before-all",
        "an adapter is committed as soon as any member has staged it",
        (
            Edit(
                PUBLISHER + "_drive",
                "if len(verified) == len(open_.members):\n        return [_commit(world, open_)]",
                "if verified:\n"
                "        return [_commit(world, msgspec.structs.replace(open_, members=tuple(verified)))]",
            ),
        ),
        ADAPTED,
    ),
    Breakage(
        "frozen-base-trained",
        "the base model is trained although there are adapters over it",
        (
            Edit(
                TRAINER + "_next_job", "bases = tuple(_base(world, scenario) for scenario in turns)", "bases = (BASE,)"
            ),
            Edit("consumers.reef_trainer.book:RecordBook._choose", "scenario or self.config.scenario", '"math"'),
        ),
        under(Shape(adapters=TWO, jobs=2)),
    ),
    Breakage(
        "anothers-records",
        "a scenario's adapter is trained on answers to another scenario",
        (Edit("reef_bus.core.records:choose", "if of != scenario or", "if"),),
        under(Shape(adapters=TWO, jobs=4)),
    ),
    Breakage(
        "one-floor-for-all",
        "a restart takes what is consumed of one scenario for what is consumed of another",
        (
            Edit(
                "consumers.reef_trainer.book:RecordBook._take_up",
                "self.book.consumed[scenario] = Consumed(batch.floor, frozenset(batch.taken))",
                "done = Consumed(batch.floor, frozenset(batch.taken))\n"
                "    self.book.consumed = dict.fromkeys(self.scenarios, done)",
            ),
        ),
        under(Shape(adapters=TWO, jobs=6, eager=True), crash=1.5),
    ),
    Breakage(
        "one-head-for-all",
        "the target of an adapter follows the base model, and not its scenario's head",
        (
            Edit(
                PUBLISHER + "_target",
                "head, adapter = head_for(world, candidate.id),",
                "head, adapter = world.publications.head,",
            ),
        ),
        under(Shape(adapters=TWO, jobs=6)),
    ),
    Breakage(
        "answered-with-anothers",
        "who does not hold a scenario's adapter answers with another one",
        (
            Edit(
                SERVING + "version",
                'residency.served(engine.residency, scenario) if engine.residency else ""',
                'next(iter(engine.residency.slots), "") if engine.residency else ""',
            ),
        ),
        ADAPTED,
    ),
    Breakage(
        "leaked-is-held",
        "an adapter whose unload was not confirmed counts as held",
        (Edit(RESIDENCY + "_leak", "replace(slot, load_ids=(), leaked=True)", "slot"),),
        under(
            Shape(adapters=TWO, jobs=8, capacity=3, asks=(("RollbackRequested", "AdapterLeaked"),) * 3, eager=True),
            leak=0.6,
        ),
    ),
    Breakage(
        "lost-for-ever",
        "what an engine had lost counts as lost when it was loaded again",
        (Edit(HELD + "_load", "self.lost -= {effect.name}", "pass"),),
        LOST,
    ),
    Breakage(
        "lost-is-named",
        "until the log was told what an engine has lost, requests name it",
        (Edit(HELD + "there", "return not name or not (self.doubted or name in self.lost)", "return True"),),
        LOST,
    ),
    Breakage(
        "not-looked-for",
        "which adapters are there is looked only if that is done before the base model's proof is on its way",
        (Edit("consumers.reef_engine.agent:Agent.react", "or self.adapters.doubted", "or False"),),
        LOST,
    ),
    Breakage(
        "damaged-ends-the-boot",
        "an engine that cannot read a committed adapter's artifact ends, as if another one could",
        (
            Edit(
                HELD + "_brought",
                "return self._failed(effect, cause(error), str(error))",
                "return self._at_fault(effect, cause(error), str(error))",
            ),
        ),
        ADAPTED,
    ),
    Breakage(
        "failing-keeps-others-waiting",
        "while an adapter's artifact is damaged, its engine loads nothing else",
        (
            Edit(
                OWED + "adapters",
                "[*_next(world, found, lost, mended), *_awaited(world, found, deadlines, mended)]",
                "_awaited(world, found, deadlines, mended) or _next(world, found, lost, mended)",
            ),
        ),
        spoiled,
    ),
    Breakage(
        "mended-is-not-loaded",
        "an artifact that was damaged is not loaded when it can be read again",
        (Edit(OWED + "_again", "failed.seq in mended", "False"),),
        spoiled,
    ),
    Breakage(
        "damage-told-again-and-again",
        "the load of an artifact that is damaged is tried again without looking whether it still is",
        (Edit(OWED + "_again", "failed.seq in mended", "True"),),
        spoiled,
    ),
    Breakage(
        "load-given-up-and-forgotten",
        "what a load has left that was given up stays where it is, and nobody counts it",
        (Edit(HELD + "load", "for name in self._strays(effect, known, await self._listed()):", "for name in ():"),),
        ADAPTED,
    ),
)
