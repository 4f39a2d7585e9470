"""The `engine` families: one chain per engine id.

Knows: what an engine's agent alone may say. Must not know: who reacts to it.
"""

from __future__ import annotations

from reef_bus.events.shapes import Event


class EngineEvent(Event, frozen=True, kw_only=True):
    """Written by that engine's agent alone."""

    family = "engine"
    id_field = "engine"
    own_chain = True
    engine: str


class EngineJoined(EngineEvent, frozen=True, kw_only=True):
    """A boot of the engine is up, holds nothing that may serve yet, and replaces every older boot of it.

    It can `accept` these transports, and take releases in these `modes`: `staged` needs room for a second copy. When it
    is to stop, it can do with the requests in hand what these `pauses` say. Beside the base model it holds so many LoRA
    `adapters` at most (null: nothing bounds it), and lists those `resident` ones, of which nothing is known. It can
    give the memory of the regions that it `releases` (`weights`, `kv_cache`, `cuda_graph`) to a job, and take it back.
    """

    url: str
    backend: str
    accepts: tuple[str, ...]
    modes: tuple[str, ...] = ("fenced",)
    pauses: tuple[str, ...] = ("drain",)
    adapters: int | None = 0
    resident: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()


class EngineFenced(EngineEvent, frozen=True, kw_only=True):
    """Generation has really stopped and every older ingress is destroyed, for this attempt.

    `previous` is the load id that served until now, since `resumed_at` (ns since the epoch, 0: it never served), with
    `served` requests; `stopped_ms` is the time from seeing the fence to having stopped.
    """

    publication: str
    attempt: int
    previous: str
    resumed_at: int
    served: int
    stopped_ms: float


class EngineStaged(EngineEvent, frozen=True, kw_only=True):
    """What the copy beside the served one hashes to. It stays as it is until it was swapped in, or dropped.

    `bytes` moved for it. They were a delta if `base_manifest` is not empty: what was served meanwhile, and is the
    base of that delta. With `adapter` it is the LoRA adapter of that name, proven by `algorithm`; requests may name it
    once its release is committed. `publication` is empty and `attempt` 0 where that had been so before.
    """

    publication: str
    attempt: int
    load_id: str
    manifest: str
    tensors: int
    bytes: int
    ms: float
    base_manifest: str = ""
    scenario: str = ""
    adapter: str = ""
    algorithm: str = "xxh3-128"


class ReceiverVerified(EngineEvent, frozen=True, kw_only=True):
    """What the engine's own memory hashes to. `publication` is empty and `attempt` 0 for a catch-up to the head.

    `method` is `received`, `memory`, `artifact` or `swapped`; `bytes` moved for it. `algorithm` hashed each of the
    `tensors` as they lie in the engine, and ends in its width in bits.
    """

    publication: str
    attempt: int
    load_id: str
    manifest: str
    method: str
    tensors: int
    bytes: int
    ms: float
    algorithm: str = "xxh3-128"


class ReceiverFailed(EngineEvent, frozen=True, kw_only=True):
    """The engine could not receive or prove the target; `detail` names the tensor where one is to blame. With `staged`
    it speaks of the copy beside the served one, and what it serves is as it was; with `adapter`, of the LoRA adapter of
    that name, of which nobody knows now whether the engine holds it. `publication` is empty and `attempt` 0 where that
    had been committed before: its artifact cannot be read, or does not fit, and the engine was given nothing of it."""

    publication: str
    attempt: int
    load_id: str
    cause: str
    detail: str
    observed: str = ""
    staged: bool = False
    scenario: str = ""
    adapter: str = ""


class AdapterUnloaded(EngineEvent, frozen=True, kw_only=True):
    """The engine holds this LoRA adapter no more: it does not list it, and answers nobody who names it."""

    adapter: str
    detail: str = ""


class AdapterLeaked(EngineEvent, frozen=True, kw_only=True):
    """The engine may hold this LoRA adapter still, though it was told to unload it: it keeps its place, and no request
    may name it, until a later unload is confirmed."""

    adapter: str
    detail: str


class EngineMemoryReleased(EngineEvent, frozen=True, kw_only=True):
    """Generation has really stopped, every older ingress is destroyed, and the memory of these `regions` is the job's.

    Their contents are lost. `fence` is the sequence of the event that raised the fence for which this was done. Of what
    served until then, `previous`, `resumed_at`, `served` and `stopped_ms` say what they say in `EngineFenced`; `ms` is
    the time that all of it took.
    """

    job: str
    fence: int
    regions: tuple[str, ...]
    previous: str
    resumed_at: int
    served: int
    stopped_ms: float
    ms: float


class EngineMemoryRestored(EngineEvent, frozen=True, kw_only=True):
    """The memory of these `regions`, which `job` had, is the engine's again. What is in it is worthless until it was
    verified."""

    job: str
    regions: tuple[str, ...]
    ms: float


class EngineLeft(EngineEvent, frozen=True, kw_only=True):
    """The boot ends: asked to, or unable to go on."""

    reason: str
