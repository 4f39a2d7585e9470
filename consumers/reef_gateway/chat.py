"""OpenAI-compatible chat requests and answers, as plain values.

Knows: the JSON of /v1/chat/completions and what this model can do. Must not know: engines, records, or HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from reef_bus.backends import Prompt
from reef_bus.errors import Rejected
from reef_bus.tokens import decode, render, room

DEFAULT_MAX_TOKENS = 4


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request this model acts upon. Fields that it does not know are ignored, as the API's clients expect."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    n: int = 1
    stream: bool = False
    logprobs: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served: rendered once, never again."""

    model: str
    prompt: Prompt
    logprobs: bool


def parse(body: bytes, model: str) -> Call:
    """Read a request. Raises Rejected saying what was found and what was expected."""
    try:
        request = msgspec.json.decode(body, type=ChatRequest)
    except msgspec.ValidationError as error:
        raise Rejected(f"the request does not fit /v1/chat/completions: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(f"the body is not JSON: {error}") from error
    if request.model != model:
        raise Rejected(f"model {request.model!r} is not served here; use {model!r}", 404)
    if request.n != 1 or request.stream:
        raise Rejected("n must be 1 and stream false: one request is one record")
    if not 0.0 <= request.temperature <= 2.0:
        raise Rejected(f"temperature is {request.temperature}; expected 0 to 2")
    ids = render(request.messages)
    return Call(model=model, prompt=_prompt(request, ids), logprobs=request.logprobs)


def _prompt(request: ChatRequest, ids: tuple[int, ...]) -> Prompt:
    given = (request.max_completion_tokens, request.max_tokens, DEFAULT_MAX_TOKENS)
    asked = next(value for value in given if value is not None)
    if not 1 <= asked <= room(ids):
        raise Rejected(f"max_tokens is {asked}; after this prompt of {len(ids)} tokens 1 to {room(ids)} fit")
    return Prompt(ids=ids, max_tokens=asked, temperature=request.temperature, seed=request.seed)


def response(
    call: Call, record: str, created: int, ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> dict[str, Any]:
    """The answer in OpenAI's form; `created` in seconds since the epoch."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": decode(ids)},
        "finish_reason": "length",
    }
    if call.logprobs:
        choice["logprobs"] = {
            "content": [{"token": decode((i,)), "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        }
    prompt, answer = len(call.prompt.ids), len(ids)
    return {
        "id": record,
        "object": "chat.completion",
        "created": created,
        "model": call.model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer},
    }
