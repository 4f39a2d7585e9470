"""OpenAI-compatible chat requests, as plain values.

Knows: the JSON of /v1/chat/completions. Must not know: engines, records, what a token is, or HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from consumers.reef_gateway.formats import DIGITS, ChatFormat
from reef_bus.backends import Prompt
from reef_bus.errors import Rejected


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request is acted upon. Fields that it does not know are ignored, as the API's clients expect."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served: rendered once, never again."""

    model: str
    prompt: Prompt
    logprobs: bool
    stream: bool = False
    include_usage: bool = False


def parse(body: bytes, model: str, format: ChatFormat = DIGITS) -> Call:
    """Read a request. Raises Rejected saying what was found and what was expected."""
    request = _decode(body)
    if request.model != model:
        raise Rejected(f"model {request.model!r} is not served here; use {model!r}", 404)
    if request.n != 1:
        raise Rejected(f"n is {request.n}; n must be 1: one request is one record")
    if request.stream_options and not request.stream:
        raise Rejected("stream_options are for a stream: expected stream to be true")
    if not 0.0 <= request.temperature <= 2.0:
        raise Rejected(f"temperature is {request.temperature}; expected 0 to 2")
    ids = format.render(request.messages, _tools(request), request.chat_template_kwargs)
    return Call(
        model=model,
        prompt=_prompt(request, ids, format),
        logprobs=request.logprobs,
        stream=request.stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def _decode(body: bytes) -> ChatRequest:
    try:
        return msgspec.json.decode(body, type=ChatRequest)
    except msgspec.ValidationError as error:
        raise Rejected(f"the request does not fit /v1/chat/completions: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(f"the body is not JSON: {error}") from error


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """What an answer must be cannot be promised: it is sampled, and nothing else."""
    if request.tool_choice not in (None, "auto", "none"):
        raise Rejected(f"tool_choice is {request.tool_choice!r}; expected auto or none: no answer is forced")
    return [] if request.tool_choice == "none" else request.tools or []


def _prompt(request: ChatRequest, ids: tuple[int, ...], format: ChatFormat) -> Prompt:
    room = format.room(ids)
    given = (request.max_completion_tokens, request.max_tokens, min(format.usual, room))
    asked = next(value for value in given if value is not None)
    if not 1 <= asked <= room:
        raise Rejected(f"max_tokens is {asked}; after this prompt of {len(ids)} tokens 1 to {room} fit")
    ends = tuple(sorted(format.stops))
    return Prompt(ids=ids, max_tokens=asked, temperature=request.temperature, seed=request.seed, stop_ids=ends)
