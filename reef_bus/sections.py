"""The sections of a deployment's configuration: their keys, and what those are when nothing is said.

Knows: names, types, defaults. Must not know: what contradicts what (`config.py`), or how anything is started.
"""

from __future__ import annotations

import msgspec

from reef_bus.core.effects import Deadlines
from reef_bus.events import Lora


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """One section of the file: keys in kebab-case, nothing unknown."""


class Nats(Part, frozen=True, kw_only=True):
    """`url` empty: a nats-server of our own on loopback, with its store in the state folder."""

    url: str = ""
    replicas: int = 1


class Gateway(Part, frozen=True, kw_only=True):
    """`port` 0 takes a free one. A request waits at most `timeout_s` for an engine and its answer together."""

    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 300.0
    max_body_bytes: int = 1024 * 1024


class Inference(Part, frozen=True, kw_only=True):
    """The engines. `accepts`: transports; `shm` serves the trainer's host. `max_batch`: prompts that are sampled
    together. An engine that is cut off from the log goes on serving what it holds; with `lease_s` above 0 it stops
    after as many seconds.

    `model_path`: a folder with the model's config.json and, for the gateway, its tokenizer (extra `chat`); empty: the
    demo's policy. `backend: sglang` needs one, and starts an SGLang server for each engine, which may take `start_s`.
    `device`: `cpu`, `cuda`, or `auto`. `update`: a version gets into the server's memory by a `broadcast`, as `tensors`
    in a request, or from `disk`; adapters are sent, or read from `disk`, too. Without a `prefix_cache` what is paused
    in place keeps its KV cache; with one, it is computed anew by the next version. `options`: the server's own, without
    dashes, as far as no other key of this section stands for them. `urls`: by engine, a server that somebody else runs:
    it is paused, loaded and asked, never ended. `router_port`: where SGLang's router listens, on the gateway's host,
    for clients that speak SGLang's native `/generate`; what they ask is not recorded. 0: none is started."""

    backend: str = "torch"
    engines: tuple[str, ...] = ("engine-0", "engine-1")
    host: str = "127.0.0.1"
    accepts: tuple[str, ...] = ("tcp", "files")
    max_batch: int = 64
    lease_s: float = 0.0
    model_path: str = ""
    device: str = "auto"
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    update: str = "broadcast"
    prefix_cache: bool = True
    urls: dict[str, str] = {}
    start_s: float = 600.0
    options: dict[str, str | int | float | bool] = {}
    router_port: int = 0


class Training(Part, frozen=True, kw_only=True):
    """`offers`: transports, best first. A job takes `groups` × `group_size` samples, none staler than `max_staleness`
    links of the base chain. With `hold`, each candidate waits for a person: `reef-bus promote` or `discard`. With
    `colocate` each job has the memory of the engines: they stop, release it, and are back when its candidate was
    published or rejected; jobs and publications take turns. With `backend: attached` the trainer is a loop of your own,
    which publishes by `reef_bus.attach`: none is started, and of the rest of this section only `offers`, `host` and
    `hold` matter."""

    backend: str = "torch"
    offers: tuple[str, ...] = ("tcp", "files")
    host: str = "127.0.0.1"
    groups: int = 16
    group_size: int = 16
    max_staleness: int = 1
    max_jobs: int = 0
    hold: bool = False
    colocate: bool = False
    seed: int = 0
    lr: float = 3e-3
    minibatches: int = 2


class Publication(Part, frozen=True, kw_only=True):
    """How releases are published: `every` candidate in its turn, or the `latest`; by how many `publishers`. In mode
    `fenced` engines stop for the transfer; in mode `staged` they receive beside what they serve, and stop to swap.
    `pause`: then the requests in hand are answered first (`drain`), or generation stops at the next token, and they
    start over with the new version (`retract`) or go on with it, each token's version recorded (`in_place`).
    `transport`: the only one to be used; empty: the first that the trainer offers and every engine accepts.
    `torch_device`: where groups of transport `torch` are, `cpu` (gloo) or `cuda` (NCCL, each end on its own GPU). With
    `delta`, over `tcp` and `files`, who stages gets what has changed since the version that it serves, where that is
    known and less than all; it needs the extra `delta`."""

    publishers: int = 2
    publish: str = "every"
    transport: str = ""
    torch_device: str = "cpu"
    mode: str = "fenced"
    pause: str = "drain"
    delta: bool = False
    deadlines: Deadlines = Deadlines()


class Adapters(Part, frozen=True, kw_only=True):
    """LoRA: each of the `scenarios` trains an adapter of its own over the base model, which is frozen then, and they
    take turns. Requests of the deployment's own scenario are answered by the base model. `rank`, `alpha`, `targets`: as
    PEFT's `r`, `lora_alpha` and `target_modules`. `capacity`: how many adapters an engine holds at most; 0: one for
    each scenario, and the next one."""

    scenarios: tuple[str, ...] = ()
    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    capacity: int = 0

    def most(self) -> int:
        """How many adapters an engine holds at most."""
        return self.capacity or (len(self.scenarios) + 1 if self.scenarios else 0)

    def lora(self) -> Lora:
        return Lora(self.rank, self.alpha, self.targets)


class Artifacts(Part, frozen=True, kw_only=True):
    """The artifact store, `at` a folder, or a URL that fsspec reaches; empty: `artifacts` in the state folder. How
    candidates' weights are kept: every `anchor_every`th in full, those between as what has changed since the one that
    they were trained from, where that is less than all. 1: all in full; more needs the extra `delta`. `keep`: how many
    releases before the head a rollback may go back to; weights and optimizer states that only older ones or unpublished
    candidates need are removed, so that no other deployment may share the store. 0: nothing ever is."""

    at: str = ""
    anchor_every: int = 1
    keep: int = 0


class Metrics(Part, frozen=True, kw_only=True):
    """Prometheus. Components listen from `port` on, one port each, in the order in which they are started, then the
    supervisor, after it a trainer that is attached, and last SGLang's router; 0: nobody does."""

    host: str = "127.0.0.1"
    port: int = 0
