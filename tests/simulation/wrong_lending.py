"""Wrong lending: what a colocated job needs broken one at a time: its fence, whom it waits for, what comes back when.

Knows: pieces of the core and of the hands, and what would be wrong instead of each. Must not know: how a breakage comes
to light.
"""

from __future__ import annotations

from tests.simulation.patching import Edit
from tests.simulation.searches import Breakage, lending

TRAINER = "reef_bus.core.reactions.trainer:"
AGENT = "consumers.reef_engine.agent:Agent."

LENDING = (
    Breakage(
        "job-without-a-fence",
        "a colocated job's fence covers nobody",
        (Edit("reef_bus.core.serving:fenced", "up(world.handover) or ", ""),),
        lending,
    ),
    Breakage(
        "starts-without-the-memory",
        "a job begins before every engine has said that its memory is released",
        (Edit(TRAINER + "_start", "(world.publications.open or holders(world))", "False"),),
        lending,
    ),
    Breakage(
        "older-word-believed",
        "a job counts on memory that was released for an earlier one",
        (Edit("reef_bus.core.serving:holders", "if engines[name].lent != handover.seq", "if not engines[name].lent"),),
        lending,
    ),
    Breakage(
        "taken-back-from-a-job",
        "an engine takes its memory back while the job has it",
        (
            Edit(
                "reef_bus.core.reactions.engine:engine",
                "return lend(world, found)",
                "return lend(world, found) or take_back(world, found, out)",
            ),
        ),
        lending,
    ),
    Breakage(
        "worthless-weights-trusted",
        "what was proven before the memory was given away counts afterwards, and an engine trusts the log alone",
        (
            Edit("reef_bus.core.membership:_moved", "if WEIGHTS in regions:", "if False:"),
            Edit(AGENT + "may_generate", " and self.proven == head.manifest", ""),
        ),
        lending,
    ),
    Breakage(
        "failure-taken-for-success",
        "an operation on memory that failed counts as done",
        (
            Edit(
                "consumers.reef_engine.memory:Memory._do",
                "self.ledger = memory.failed(self.ledger, why)\n        raise Uncertain(why) from error",
                "why = str(error)",
            ),
        ),
        lending,
    ),
    Breakage(
        "step-keeps-its-memory",
        "a trainer says that its candidate is ready with the memory that its step took",
        (Edit("consumers.reef_trainer.role:Trainer._give_back", "self.backend.release()", "pass"),),
        lending,
    ),
    Breakage(
        "discarded-in-its-step",
        "a job is discarded while its step still has the memory",
        (Edit(TRAINER + "_job", " and not stepping", ""),),
        lending,
        shielded="a step is one instant here, so that nobody can act in it; a unit test of the memory holds it",
    ),
)
