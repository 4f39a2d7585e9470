"""The three patterns as data: which processes there are, who updates, and where each may be killed.

Knows: names. Must not know: what any of them does.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.bench.baselines.weights import TENSORS

RECEIVERS = ("receiver-0", "receiver-1")
BEFORE, DURING, AFTER = PHASES = ("before", "during", "after")
EACH_TENSOR = tuple(f"tensor:{index}" for index in range(TENSORS))

Points = dict[tuple[str, str], tuple[str, ...]]  # of (role, phase)

RECEIVER: Points = {
    ("receiver", BEFORE): ("paused",),
    ("receiver", DURING): EACH_TENSOR[:-1],
    ("receiver", AFTER): ("loaded", "resuming", "resumed"),
}


class Pattern(NamedTuple):
    """`processes` are what the harness starts besides receivers, in order; `roles` are what it kills. `go` is told to
    make an update, `samples` takes answers. With `ray`, receivers and the trainer are actors that Ray starts."""

    name: str
    title: str
    processes: tuple[str, ...]
    roles: tuple[str, ...]
    go: str
    samples: str
    points: Points
    ray: bool = False


PATTERNS = {
    found.name: found
    for found in (
        Pattern(
            "broadcast",
            "torch.distributed broadcast (as verl, OpenRLHF, TRL)",
            ("trainer",),
            ("trainer", "receiver"),
            "trainer",
            "trainer",
            {
                ("trainer", BEFORE): ("batch", "writing", "saved", "paused"),
                ("trainer", DURING): EACH_TENSOR[:-1],
                ("trainer", AFTER): (EACH_TENSOR[-1], "sent", "resumed"),
                **RECEIVER,
            },
        ),
        Pattern(
            "disk",
            "HTTP fan-out, reload from disk (as prime-rl, AReaL's disk mode)",
            ("coordinator", "trainer"),
            ("trainer", "receiver", "coordinator"),
            "trainer",
            "coordinator",
            {
                ("trainer", BEFORE): ("batch",),
                ("trainer", DURING): ("writing",),
                ("trainer", AFTER): ("saved",),
                ("coordinator", BEFORE): ("seen", "paused"),
                ("coordinator", DURING): ("sending",),
                ("coordinator", AFTER): ("sent", "resumed"),
                **RECEIVER,
            },
        ),
        Pattern(
            "actors",
            "Ray actors (as NeMo RL, SkyRL)",
            ("coordinator",),
            ("trainer", "receiver", "coordinator"),
            "coordinator",
            "coordinator",
            {
                ("trainer", BEFORE): ("batch", "writing", "saved"),
                ("trainer", DURING): EACH_TENSOR,
                ("trainer", AFTER): ("sent",),
                ("coordinator", BEFORE): ("batch", "saved", "paused"),
                ("coordinator", DURING): EACH_TENSOR[:-1],
                ("coordinator", AFTER): (EACH_TENSOR[-1], "sent", "resumed"),
                **RECEIVER,
            },
            ray=True,
        ),
    )
}
