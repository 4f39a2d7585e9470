"""What an agent says of a receipt or a proof, as events.

Knows: effects, what was found. Must not know: how it was found, or what becomes of it.
"""

from __future__ import annotations

from consumers.reef_engine.held import Found
from reef_bus.core.effects import Ingress, Stage
from reef_bus.errors import ContractError, TransferError, Unavailable
from reef_bus.events import Event, ReceiverFailed, ReceiverVerified


def verified(
    engine: str, load_id: str, found: Found, method: str, moved: int, ms: float, publication: str = "", attempt: int = 0
) -> Event:
    return ReceiverVerified(
        engine=engine,
        publication=publication,
        attempt=attempt,
        load_id=load_id,
        manifest=found.digest,
        method=method,
        tensors=found.tensors,
        bytes=moved,
        ms=ms,
        algorithm=found.algorithm,
    )


def failed(engine: str, effect: Ingress, cause: str, detail: str, observed: str = "") -> Event:
    return ReceiverFailed(
        engine=engine,
        publication=effect.publication,
        attempt=effect.attempt,
        load_id=effect.load_id,
        cause=cause,
        detail=detail,
        observed=observed,
        staged=isinstance(effect, Stage),
    )


def cause(error: TransferError | ContractError | Unavailable) -> str:
    if isinstance(error, TransferError):
        return error.cause
    return "artifact" if isinstance(error, ContractError) else "closed"
