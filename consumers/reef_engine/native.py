"""SGLang's native `generate` over an engine's endpoint: for SGLang's router, and whoever speaks that through it.

Knows: what of SGLang 0.5.23's request an engine here can do, and the shape of its answer. Must not know: who asks, or
how anything is generated. What would change the tokens and cannot be done is refused, never ignored. Nothing that is
answered here is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from consumers.reef_engine.endpoint import Endpoint
from reef_bus.backends import Generated, Prompt, boot_url
from reef_bus.errors import Rejected, Unavailable

ANY = ()
DEFAULT_TOKENS = 128  # SGLang's
BODY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rid", "model", "log_metrics", "no_logs", "custom_labels", "routing_key"), ANY),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
}
SAMPLING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), ANY),
    **dict.fromkeys(("top_p", "repetition_penalty", "n"), (1,)),
    "top_k": (-1, 1 << 30),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens"), (0,)),
}
"""Fields that we do not read: what each may be, since it then changes nothing about the tokens (empty: anything). Every
other field has to be null, false or empty."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    max_new_tokens: int | None = DEFAULT_TOKENS
    temperature: float = 1.0
    ignore_eos: bool = False
    sampling_seed: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of the body. `lora_path` names a scenario, as `x-reef-scenario` does at a gateway."""

    input_ids: tuple[int, ...] = ()
    sampling_params: Sampling | None = None
    return_logprob: bool | None = False
    lora_path: str | None = None
    rid: str | None = None


class Native:
    """The routes of one boot, under a path that names it: SGLang's router sends no header of ours."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.agent = endpoint, endpoint.agent

    def routes(self) -> list[web.RouteDef]:
        logging.getLogger("aiohttp.server").addFilter(_no_preface)
        at = boot_url("", "{boot}")
        return [web.post(f"{at}/generate", self.generate), web.get(f"{at}/health", self.health)]

    async def health(self, request: web.Request) -> web.Response:
        """200 only while this boot may generate."""
        return web.Response(status=200 if self._named(request) and self.agent.may_generate() else 503)

    async def generate(self, request: web.Request) -> web.Response:
        """400 for what cannot be done, 404 for a scenario that is not known. 503 is what the router asks again after,
        at another worker: for another boot's request, when too many wait, and when this boot ends."""
        try:
            if not self._named(request):
                raise Unavailable(f"this is boot {self.agent.me.boot}")
            asked = read(await request.read())
            prompt = msgspec.structs.replace(prompt_of(asked), scenario=self._scenario(asked.lora_path or ""))
            return web.json_response(answer(asked, await self.endpoint.ask(prompt)))
        except Rejected as error:
            return _error(error.status, str(error))
        except Unavailable as error:
            return _error(503, str(error))

    def _named(self, request: web.Request) -> bool:
        return request.match_info["boot"] == self.agent.me.boot

    def _scenario(self, name: str) -> str:
        config = self.agent.config
        known = dict.fromkeys((*config.adapters.scenarios, *self.agent.world.training.adapters))
        if name in ("", config.scenario):
            return ""
        if name not in known:
            raise Rejected(
                f"lora_path {name!r} is not known here; it may be {', '.join([config.scenario, *known])}", 404
            )
        return name


def read(body: bytes) -> Request:
    """Raises Rejected for what cannot be read, or done."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
        params = found.get("sampling_params") or {}
        if isinstance(params, dict):
            _refuse({name: value for name, value in params.items() if name not in Sampling.__struct_fields__}, SAMPLING)
        _refuse({name: value for name, value in found.items() if name not in Request.__struct_fields__}, BODY)
        return msgspec.convert(found, Request)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(f"the body does not fit: {error}") from error


def _refuse(fields: Mapping[str, Any], may_be: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in fields.items():
        harmless = value in (None, False) or value in ("", [], {}) or may_be.get(name) == ANY
        if not harmless and value not in may_be.get(name, ()):
            raise Rejected(f"{name} is {value!r:.80}, which engines here cannot do: leave it out")


def prompt_of(request: Request) -> Prompt:
    """Raises Rejected."""
    sampling = request.sampling_params or Sampling()
    if not request.input_ids:
        raise Rejected("input_ids is empty or missing: engines here take one prompt, as token ids")
    if not sampling.ignore_eos:
        raise Rejected("sampling_params.ignore_eos is not true: engines here go on to max_new_tokens")
    if sampling.max_new_tokens is None or sampling.max_new_tokens < 1:
        raise Rejected(f"sampling_params.max_new_tokens is {sampling.max_new_tokens}: expected 1 or more")
    if not 0 <= sampling.temperature <= 2:
        raise Rejected(f"sampling_params.temperature is {sampling.temperature:g}: expected 0 to 2")
    return Prompt(
        ids=request.input_ids,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.sampling_seed,
    )


class Part(NamedTuple):
    version: str
    start: int
    end: int


def answer(request: Request, found: Generated) -> dict[str, Any]:
    """In SGLang's shape, with the load id as `weight_version`: the last one, where several made the answer."""
    done = found.completion
    parts = [Part(span.load_id, span.first, span.first + span.count) for span in found.spans]
    parts = parts or [Part(found.load_id, 0, len(done.ids))]
    meta: dict[str, Any] = {
        "id": request.rid or "",
        "finish_reason": {"type": done.finish_reason, "length": len(done.ids)},
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(done.ids),
        "weight_version": parts[-1].version,
        "weight_versions": [part._asdict() for part in parts],
    }
    if request.return_logprob:
        pairs = zip(done.logprobs, done.ids, strict=True)
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [[each, id_, None] for each, id_ in pairs]}
    return {"text": "", "output_ids": list(done.ids), "meta_info": meta}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _no_preface(record: logging.LogRecord) -> bool:
    """The router tries gRPC, too, at each worker that it gets; aiohttp would show a traceback for each."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, BadHttpMessage) and "PRI" in str(error))
