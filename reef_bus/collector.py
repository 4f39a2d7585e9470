"""Python's collector of cycles, off where it is known to find none.

Knows: the interpreter. Must not know: what is done meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """For work whose objects all stay and are part of no cycle, such as imports, or millions of events: to look through
    them again and again costs a tenth of an import of torch, and a fifth of an audit."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
