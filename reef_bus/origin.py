"""Fetches what a log begins from: the start that its first event names, out of the artifact folder.

Knows: where that blob lies. Must not know: what is in it (`core/start.py`), or who folds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reef_bus.core.start import Start, decode_start
from reef_bus.errors import ContractError
from reef_bus.events import LogOpened, Recorded

Fetch = Callable[[str], bytes]
"""A blob by its digest, compared with it. Raises ContractError when it is missing or damaged."""


def start_of(recorded: Recorded, fetch: Fetch) -> Start | None:
    """The start that the event names; None for every event that names none. Raises ContractError, with the event's
    sequence, when it cannot be had: without it, the log cannot be folded."""
    if not isinstance(recorded.event, LogOpened) or recorded.event.start is None:
        return None
    try:
        return decode_start(fetch(recorded.event.start.digest))
    except ContractError as error:
        raise ContractError(f"the log begins from a start that cannot be read: {error}", recorded.seq) from error


def nowhere(digest: str) -> bytes:
    """For who knows no artifact folder."""
    raise ContractError(f"no artifact folder to read blob {digest} from: name the deployment by -c FILE or --state DIR")


def blobs_in(root: Path | str) -> Fetch:
    """Fetches from the artifact store at `root`, which is opened only when a log names a start."""

    def fetch(digest: str) -> bytes:
        from reef_bus.artifacts import ArtifactStore  # it needs an extra that many readers do without

        return ArtifactStore(root).get(digest)

    return fetch
