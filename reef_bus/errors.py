"""The error tree: five families, named by what the caller should do next.

ReefError
├── Rejected        show it to whoever asked; nothing changed
│   └── NotHeld     prove again what the engine holds, and ask again
├── Conflict        read again, decide again
├── Unavailable     retry with back-off
├── ContractError   halt this consumer and say where
└── TransferError   abandon the attempt and record it
    ├── DeltaError  the same bytes are to be had in full: take those
    └── Misfit      say so: no engine of this model takes it, whoever tries again

A message says what was found, what was expected, and what to run next. Callers read attributes, never the text.
"""

from __future__ import annotations


class ReefError(Exception):
    """Root of everything that this project raises on purpose."""


class Rejected(ReefError):
    """A request that was refused: a person's or a client's mistake. `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NotHeld(Rejected):
    """An engine has no adapter of the name that a prompt asks for: no mistake of whoever asked."""


class Conflict(ReefError):
    """Somebody else appended first: the family's last stored event is not the expected one."""

    def __init__(self, family: str, expected: int) -> None:
        super().__init__(f"{family}: the last stored event is no longer {expected}; fold, then decide again")
        self.family = family
        self.expected = expected


class Unavailable(ReefError):
    """The other side gave no answer; the outcome of what was asked is unknown."""


class ContractError(ReefError):
    """The log holds something that this consumer must not go on from. `seq` names where (0: not on the log)."""

    def __init__(self, message: str, seq: int = 0) -> None:
        super().__init__(message)
        self.seq = seq


class TransferError(ReefError):
    """Bytes did not arrive whole. `cause`: refused, closed, stalled, mismatch, protocol, memory, retracted."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class Misfit(TransferError):
    """What was read is no adapter for the model that is served. The engine was given nothing of it."""


class DeltaError(TransferError):
    """A delta that gives nothing to rely on: take the version's full bytes. `flaw` tells why. Of its bytes: foreign,
    truncated, damaged, reordered, trailing, oversized. Of what it should be applied to, or gave: base, target, layout,
    result."""

    def __init__(self, flaw: str, message: str) -> None:
        super().__init__("mismatch" if flaw in ("base", "target", "layout", "result") else "protocol", message)
        self.flaw = flaw
