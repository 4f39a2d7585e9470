"""What every test shares: two cores, no luck.

Knows: pytest's and hypothesis' settings. Must not know: any module of the project.
"""

from __future__ import annotations

import os

from hypothesis import settings

# Read when torch is first imported: the machine has two cores, and several processes of a test share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline, because a shared machine stalls; derandomized, because a run that failed must fail again.
settings.register_profile("reef", deadline=None, derandomize=True)
settings.load_profile("reef")
