"""An SGLang server that somebody else runs, and lends to an agent: looked at, and never ended. Whoever lent it may end
it at any time; then the boot of its agent ends, and a new one waits for it.

Knows: one client, what the configuration says of the server. Must not know: how it was started, or by whom.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from consumers.reef_engine.sglang import requests
from consumers.reef_engine.sglang.client import Client
from consumers.reef_engine.sglang.launch import POLL_S, SAY_S, unhealthy
from reef_bus.config import Inference
from reef_bus.errors import Rejected, TransferError, Unavailable
from reef_bus.runner import blocking
from reef_bus.sections import Adapters

log = logging.getLogger(__name__)

ASK_S = 5.0


class Info(msgspec.Struct, frozen=True):
    """What we read of its /server_info. None of it may be missing: what we would take for it need not be so."""

    tp_size: int
    tokenizer_worker_num: int
    dtype: str
    disable_radix_cache: bool
    disable_overlap_schedule: bool
    enable_lora: bool | None
    max_loaded_loras: int | None
    max_lora_rank: int | None
    lora_target_modules: list[str] | None


async def ready(client: Client, inference: Inference, adapters: Adapters, *, spans: bool) -> None:
    """Wait until it generates; one that an agent left paused is told to. `spans`: an answer may be made by several
    versions. Raises Unavailable when it does not in time, and Rejected for another one than the configuration says:
    what it has to hold could not be worked out."""
    began = said = time.monotonic()
    for hindered in (_rests, unhealthy):
        while why := await blocking(hindered, client):
            now = time.monotonic()
            if now - began > inference.start_s:
                raise Unavailable(f"no SGLang generates at {client.url} (waited {inference.start_s:g} s): {why}")
            if now - said > SAY_S:
                said = now
                log.info("no SGLang generates at %s for %.0f s: %s", client.url, now - began, why)
            await asyncio.sleep(POLL_S)
    if wrong := _wrong(await blocking(client.get, "server_info"), inference, adapters, spans=spans):
        raise Rejected(f"the server at {client.url} {wrong}")


def _rests(client: Client) -> str:
    """Why it is not up, or could not be told to go on."""
    try:
        client.get("model_info", ASK_S)
        client.post("continue_generation", requests.continue_generation(), ASK_S)
    except (TransferError, Unavailable) as error:
        return str(error)
    return ""


def _wrong(said: object, inference: Inference, adapters: Adapters, *, spans: bool) -> str:
    try:
        info = msgspec.convert(said, Info)
    except msgspec.ValidationError as error:
        return f"is of another version than ours, by its /server_info: {error}"
    return _differs(info, inference, spans=spans) or (_holds_none(info, adapters) if adapters.most() else "")


def _differs(said: Info, inference: Inference, *, spans: bool) -> str:
    """What the configuration says otherwise, and how to set it right."""
    if said.tp_size != inference.tensor_parallel_size:
        return f"has {said.tp_size} ranks: set inference.tensor-parallel-size"
    if said.tokenizer_worker_num != 1:
        return "has tokenizer workers that each name another version: start it without --tokenizer-worker-num"
    if said.dtype != inference.dtype:
        return f"was started with --dtype {said.dtype}: set inference.dtype"
    if not inference.prefix_cache and not said.disable_radix_cache:
        return "has a prefix cache: set inference.prefix-cache, or start it with --disable-radix-cache"
    if spans and not said.disable_overlap_schedule:
        return "counts a token to the wrong version: start it with --disable-overlap-schedule, or set publication.pause"
    return ""


def _holds_none(said: Info, adapters: Adapters) -> str:
    """Why it cannot hold the adapters as they are configured, or would not keep them."""
    if not said.enable_lora:
        return "takes no adapters: start it with --enable-lora"
    if said.max_loaded_loras is not None:
        return "makes room for adapters by itself: start it without --max-loaded-loras"
    if (said.max_lora_rank or 0) < adapters.rank:
        return f"takes adapters of rank {said.max_lora_rank} at most: start it with --max-lora-rank {adapters.rank}"
    if missing := sorted(set(adapters.targets) - set(said.lora_target_modules or ())):
        return f"takes no adapters with {missing[0]}: start it with --lora-target-modules {' '.join(adapters.targets)}"
    return ""
