"""A deployment's configuration: YAML or JSON, typed, strict, with dotted overrides.

Knows: names, defaults and what contradicts what. Must not know: how anything is started.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from reef_bus.core.effects import Policy, Restarts
from reef_bus.core.ids import adapter_name
from reef_bus.core.publication import IN_PLACE, PAUSES
from reef_bus.errors import Rejected
from reef_bus.sections import Adapters, Artifacts, Gateway, Inference, Metrics, Nats, Part, Publication, Training
from reef_bus.topology import DUPLICATE_WINDOW_S, check_name

__all__ = [
    "Adapters",
    "Artifacts",
    "Config",
    "Gateway",
    "Inference",
    "Metrics",
    "Nats",
    "Publication",
    "Training",
    "build",
    "check",
    "dump",
    "load",
    "require_router",
]

SCHEMA_VERSION = 1
STANDBY_S = 0.25
MAX_PUBLISHERS = 16  # they only append: more than a few add nothing but conflicts
TRANSPORTS = ("tcp", "torch", "ucx", "shm", "files")
"""Not among the defaults: ucx and torch need more than is installed, shm serves no engine on another host."""
ATTACHED = "attached"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UPDATES = ("broadcast", "tensors", "disk")
OPTIONS = {
    **dict.fromkeys(("model", "model-path", "served-model-name", "tokenizer-path"), "inference.model-path"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "inference.tensor-parallel-size"),
    **dict.fromkeys(("disable-radix-cache", "enable-radix-cache"), "inference.prefix-cache"),
    **{name: f"inference.{name}" for name in ("device", "dtype")},
    "max-running-requests": "inference.max-batch",
    "disable-overlap-schedule": "publication.pause",
    "enable-memory-saver": "training.colocate",
    **dict.fromkeys(("enable-lora", "lora-paths"), "adapters.scenarios"),
    "max-lora-rank": "adapters.rank",
    "lora-target-modules": "adapters.targets",
    **dict.fromkeys(("max-loaded-loras", "max-loras-per-batch"), "adapters.capacity"),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size"), "more inference.engines"),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size", "nnodes"), "inference.tensor-parallel-size"),
    "config": "the options themselves",
    **dict.fromkeys(
        (
            *("host", "port", "api-key", "admin-api-key"),
            *("load-format", "weight-version", "skip-tokenizer-init", "skip-server-warmup"),
        ),
        "nothing: the agent gives it",
    ),
    "model-checksum": "nothing: what is loaded is proven",
    "tokenizer-worker-num": "nothing: each of several would name another version",
}
"""SGLang's options that `inference.options` may not name, and the key that stands for each."""
LONGEST_LOAD_ID = f"{'f' * 32}:{10**12}"  # that any deployment will see
ZSTD = () if sys.version_info >= (3, 14) else ("backports", "backports.zstd")  # a parent comes before what is in it
ROUTER = "router"
RESERVED = ("trainer", "publisher", "gateway", ROUTER, "supervisor", "nats")


class Config(Part, frozen=True, kw_only=True):
    """Everything that the roles of one deployment must agree on."""

    schema_version: int = SCHEMA_VERSION
    deployment: str = "reef"
    scenario: str = "digit"
    model: str = "reef-digit"
    state_dir: str = "reef-state"
    nats: Nats = Nats()
    gateway: Gateway = Gateway()
    inference: Inference = Inference()
    training: Training = Training()
    publication: Publication = Publication()
    adapters: Adapters = Adapters()
    artifacts: Artifacts = Artifacts()
    supervision: Restarts = Restarts()
    metrics: Metrics = Metrics()

    def folder(self, *parts: str) -> Path:
        """A folder of the state directory, created when it is missing."""
        path = Path(self.state_dir, *parts)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def artifact_root(self) -> Path | str:
        """Where blobs lie: a folder, which need not exist yet, or a URL."""
        at = self.artifacts.at
        return at if "://" in at else Path(at or Path(self.state_dir, "artifacts"))

    def publishers(self) -> list[str]:
        """Component ids; the first acts at once, the others are its standbys."""
        return ["publisher", *(f"publisher-{n}" for n in range(2, self.publication.publishers + 1))]

    def patience_s(self, publisher: str) -> float:
        """For how long a publisher leaves what is owed to the others."""
        return 0.0 if publisher == "publisher" else STANDBY_S

    def components(self) -> dict[str, str]:
        """Component id → role, in the order in which they are started."""
        engines = dict.fromkeys(self.inference.engines, "engine")
        publishers = dict.fromkeys(self.publishers(), "publisher")
        trainer = {} if self.training.backend == ATTACHED else {"trainer": "trainer"}
        router = {ROUTER: ROUTER} if self.inference.router_port else {}
        return {**trainer, **engines, **publishers, "gateway": "gateway", **router}

    def metrics_port(self, component: str) -> int:
        """Raises Rejected for a component that this configuration does not name."""
        known = [*(name for name in self.components() if name != ROUTER), "supervisor"]
        if self.training.backend == ATTACHED:
            known.append("trainer")
        known += [ROUTER] if self.inference.router_port else []  # last, so that nobody else's port moves for it
        if component not in known:
            raise Rejected(f"component {component!r} has no metrics port: the configuration names {', '.join(known)}")
        return self.metrics.port + known.index(component)

    def tells_deltas(self) -> bool:
        """Whether candidates are also told from what they were trained from."""
        return self.publication.delta or self.artifacts.anchor_every > 1

    def policy(self) -> Policy:
        published = self.publication
        return Policy(
            transport=published.transport,
            mode=published.mode,
            pause=published.pause,
            publish=published.publish,
            deadlines=published.deadlines,
            keep=self.artifacts.keep,
        )


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The file's configuration with `key.sub-key=value` overrides. Raises Rejected with the key that is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Rejected(f"{path}: {error.strerror}; `reef-bus up --example` prints a file to start from") from error
    return build(str(path), _parse(path, text), overrides)


def build(where: str, data: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """As `load`, from what a file `where` holds."""
    for override in overrides:
        _override(data, override)
    return check(_convert(where, data))


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(text) if path.suffix == ".json" else msgspec.yaml.decode(text)
    except ImportError as error:
        raise Rejected("reading YAML needs an extra: pip install 'reef-bus[serve]'") from error
    except msgspec.DecodeError as error:
        raise Rejected(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise Rejected(f"{path}: found {type(data).__name__}, expected keys and values")
    return data


def _override(data: dict[str, Any], override: str) -> None:
    key, sign, value = override.partition("=")
    if not sign or not key:
        raise Rejected(f"override {override!r}: expected key.sub-key=value")
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise Rejected(f"override {override!r}: {parent} is not a section")
    data[last] = _value(value)


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _convert(where: str, data: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise Rejected(f"{where}: {error}") from error


def check(config: Config) -> Config:
    """`config` if its parts fit together, else Rejected."""
    if config.schema_version != SCHEMA_VERSION:
        raise Rejected(f"schema-version is {config.schema_version}, this version reads {SCHEMA_VERSION}")
    check_name("deployment", config.deployment)
    _check_artifacts(config.artifacts.at)
    for engine in config.inference.engines:
        check_name("engine", engine)
        if engine in (*RESERVED, *config.publishers()):
            raise Rejected(f"inference.engines: {engine!r} is the name of another component; choose another")
    if not config.inference.engines or len(set(config.inference.engines)) != len(config.inference.engines):
        raise Rejected(f"inference.engines is {list(config.inference.engines)}: expected at least one, no name twice")
    if not 0 < config.gateway.timeout_s <= DUPLICATE_WINDOW_S:
        raise Rejected(
            f"gateway.timeout-s is {config.gateway.timeout_s:g}: expected at most {DUPLICATE_WINDOW_S}, the time for "
            "which the server knows a repeated record by its id"
        )
    if not 0 <= config.inference.lease_s < math.inf:
        raise Rejected(f"inference.lease-s is {config.inference.lease_s:g}: expected 0 (no lease) or seconds")
    for key, named in (("training.offers", config.training.offers), ("inference.accepts", config.inference.accepts)):
        if unknown := [name for name in named if name not in TRANSPORTS]:
            raise Rejected(f"{key} names {unknown[0]!r}; this version has: {', '.join(TRANSPORTS)}")
    transport, common = config.publication.transport, set(config.training.offers) & set(config.inference.accepts)
    if not common or (transport and transport not in common):
        raise Rejected(
            f"publication.transport is {transport or 'any'!r}; the trainer offers {list(config.training.offers)}, the "
            f"engines accept {list(config.inference.accepts)}"
        )
    if config.publication.publish not in ("every", "latest"):
        raise Rejected(f"publication.publish is {config.publication.publish!r}; expected every or latest")
    if config.publication.torch_device not in ("cpu", "cuda"):
        raise Rejected(f"publication.torch-device is {config.publication.torch_device!r}; expected cpu or cuda")
    if config.publication.mode not in ("fenced", "staged"):
        raise Rejected(f"publication.mode is {config.publication.mode!r}; expected fenced or staged")
    if config.publication.delta and config.publication.mode != "staged":
        raise Rejected(
            "publication.delta needs publication.mode staged: in mode fenced a delta would overwrite its own base"
        )
    if config.artifacts.anchor_every < 1:
        raise Rejected(f"artifacts.anchor-every is {config.artifacts.anchor_every}: expected 1 (all in full) or more")
    if config.artifacts.keep < 0:
        raise Rejected(f"artifacts.keep is {config.artifacts.keep}: expected 0 (everything) or a number of releases")
    if config.artifacts.keep and config.training.backend == ATTACHED:
        raise Rejected(
            "artifacts.keep is for trainers that are roles: what a loop of your own handed in is never removed"
        )
    if config.tells_deltas() and not all(map(_installed, ("numpy", *ZSTD))):
        raise Rejected("publication.delta and artifacts.anchor-every need an extra: pip install 'reef-bus[delta]'")
    if not 1 <= config.publication.publishers <= MAX_PUBLISHERS:
        raise Rejected(f"publication.publishers is {config.publication.publishers}: expected 1 to {MAX_PUBLISHERS}")
    if config.publication.pause not in PAUSES:
        raise Rejected(f"publication.pause is {config.publication.pause!r}; expected one of {', '.join(PAUSES)}")
    _check_engines(config.inference)
    if config.inference.router_port and config.inference.router_port == config.gateway.port:
        raise Rejected(f"inference.router-port and gateway.port are both {config.gateway.port}: choose another one")
    _check_adapters(config)
    _check_colocate(config)
    if config.training.backend not in ("torch", ATTACHED):
        raise Rejected(f"training.backend is {config.training.backend!r}; this version has: torch, {ATTACHED}")
    return config


def _check_adapters(config: Config) -> None:
    adapters, names = config.adapters, config.adapters.scenarios
    if config.scenario in names or len(set(names)) != len(names):
        raise Rejected(
            f"adapters.scenarios is {list(names)}: expected no name twice, and not {config.scenario!r}, which is the "
            "base model's (scenario)"
        )
    for name in names:
        adapter_name(name, LONGEST_LOAD_ID)
    if names and config.training.backend == ATTACHED:
        raise Rejected("adapters.scenarios needs a trainer that is a role: a loop of your own publishes whole models")
    if names and not {"files"} <= set(config.inference.accepts):
        raise Rejected(f"adapters travel as files; inference.accepts is {list(config.inference.accepts)}: add files")
    if names and (adapters.rank < 1 or adapters.alpha < 1 or not adapters.targets):
        raise Rejected("adapters.rank and adapters.alpha are at least 1, and adapters.targets names at least one layer")
    if adapters.capacity < 0 or 0 < adapters.capacity <= len(names):
        raise Rejected(
            f"adapters.capacity is {adapters.capacity}: {len(names)} scenarios need room for {len(names) + 1}, their "
            "adapters and the next one; 0 sees to it"
        )


def _check_colocate(config: Config) -> None:
    """What training where the engines run cannot be combined with, and why."""
    if not config.training.colocate:
        return
    for key, found, why in (
        (
            "training.backend attached",
            config.training.backend == ATTACHED,
            "a loop of your own keeps its memory",
        ),
        ("training.hold", config.training.hold, "no engine would serve while a candidate waits for a person"),
        ("adapters.scenarios", bool(config.adapters.scenarios), "adapters would be lost with the engines' memory"),
        ("publication.mode staged", config.publication.mode == "staged", "there is no room for a second copy"),
        ("publication.pause in_place", config.publication.pause == IN_PLACE, "what requests in hand need is released"),
        ("inference.urls", bool(config.inference.urls), "a borrowed server's memory is not ours to give"),
    ):
        if found:
            raise Rejected(f"training.colocate cannot be combined with {key}: {why}")


def _check_engines(inference: Inference) -> None:
    if inference.backend not in ("torch", "sglang"):
        raise Rejected(f"inference.backend is {inference.backend!r}; this version has: torch, sglang")
    if inference.backend == "sglang" and not Path(inference.model_path, "config.json").is_file():
        raise Rejected(
            f"inference.model-path is {inference.model_path!r}: SGLang needs a folder with the model's config.json"
        )
    if inference.device not in ("auto", "cpu", "cuda"):
        raise Rejected(f"inference.device is {inference.device!r}; expected auto, cpu or cuda")
    if inference.update not in UPDATES:
        raise Rejected(f"inference.update is {inference.update!r}; expected one of {', '.join(UPDATES)}")
    if inference.tensor_parallel_size < 1:
        raise Rejected(f"inference.tensor-parallel-size is {inference.tensor_parallel_size}; expected 1 or more")
    if not 0 <= inference.router_port < 1 << 16:
        raise Rejected(f"inference.router-port is {inference.router_port}: expected 0 (no router) or a port")
    if not 0 < inference.start_s < math.inf:
        raise Rejected(f"inference.start-s is {inference.start_s:g}; expected seconds")
    if unknown := [engine for engine in inference.urls if engine not in inference.engines]:
        raise Rejected(f"inference.urls names {unknown[0]!r}; inference.engines are {', '.join(inference.engines)}")
    for engine, url in inference.urls.items():
        if not _is_address(url):
            raise Rejected(f"inference.urls has {url!r} for {engine}; expected http://host:port")
    if len({url.rstrip("/") for url in inference.urls.values()}) < len(inference.urls):
        raise Rejected("inference.urls names one server twice: each engine would load over the other")
    if inference.urls and inference.update == "disk":
        raise Rejected("inference.update disk: a server that is not ours would be called after our folder afterwards")
    far = [url for url in inference.urls.values() if urlsplit(url).hostname not in LOOPBACK]
    if far and inference.update == "broadcast" and inference.host in (*LOOPBACK, "0.0.0.0"):
        raise Rejected(
            f"inference.host is {inference.host!r}, where {far[0]} would look for the broadcast: set an address of "
            "this machine that it reaches, or inference.update tensors"
        )
    for name in inference.options:
        if stands := _stands_for(name.replace("_", "-").removeprefix("--")):
            raise Rejected(f"inference.options names {name!r}: set {stands} instead")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for what is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and " " not in url


def _stands_for(option: str) -> str:
    """The server takes the beginning of an option's name for all of it."""
    return OPTIONS.get(option) or next((key for name, key in OPTIONS.items() if name.startswith(option)), "")


def _check_artifacts(where: str) -> None:
    """A URL is written to files and logs, and means the same store to every process."""
    scheme, sign, rest = where.partition("://")
    if not sign:
        return
    shown = f"{scheme}://{rest.rpartition('@')[2]}"
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or scheme == "memory":
        raise Rejected(
            f"artifacts.at is {shown!r}: expected a folder, or one protocol that every process reaches by itself"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise Rejected(f"artifacts.at is {shown!r}: expected file:///FOLDER, from the root of this machine's files")
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise Rejected(
            f"artifacts.at is {shown!r} with a password, which would be seen in files and logs; take it out, and set "
            f"FSSPEC_{scheme.upper()}_PASSWORD in the environment of every process"
        )


def require_router(config: Config) -> None:
    """Called where the router is started: Rejected if this host has none, or none is asked for."""
    if not config.inference.router_port:
        raise Rejected("inference.router-port is 0, which means no router: set a port")
    if not _installed("sglang_router"):
        raise Rejected("inference.router-port: sglang-router is not installed here; pip install 'reef-bus[router]'")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def dump(config: Config) -> bytes:
    """The configuration as JSON that `load` reads."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
