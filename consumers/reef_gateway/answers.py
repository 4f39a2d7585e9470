"""What a client is told of a recorded answer: one object, or the chunks of a stream, in OpenAI's form.

Knows: the JSON of /v1/chat/completions. Must not know: engines, how an answer is recorded, or HTTP.
An answer ends with its first stop token. Where an engine went on after it, that is recorded, and told to nobody here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consumers.reef_gateway.chat import Call
from consumers.reef_gateway.formats import ChatFormat
from reef_bus.backends import Completion


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`created` in seconds since the epoch. `ids`, each with its logprob, go as far as the stop token; the first
    `spoken` of them are the text."""

    call: Call
    record: str
    created: int
    format: ChatFormat
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spoken: int

    @classmethod
    def of(cls, call: Call, record: str, created: int, format: ChatFormat, done: Completion) -> Reply:
        ids = done.ids[: call.prompt.answered(done.ids)]
        logprobs, stopped = done.logprobs[: len(ids)], bool(ids) and ids[-1] in call.prompt.stop_ids
        spoken = len(ids) - stopped
        return cls(call=call, record=record, created=created, format=format, ids=ids, logprobs=logprobs, spoken=spoken)

    @property
    def finish_reason(self) -> str:
        return "length" if self.spoken == len(self.ids) else "stop"


def whole(reply: Reply) -> dict[str, Any]:
    """The answer as one object."""
    message = {"role": "assistant", "content": reply.format.spoken(reply.ids[: reply.spoken])}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    if reply.call.logprobs:
        choice["logprobs"] = _logprobs(reply, 0, len(reply.ids))
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply) -> Iterator[dict[str, Any]]:
    """The answer as a stream: a chunk for the role, one for each piece of text, one for the end, and one for what it
    cost if that was asked for. Every token's logprob is in the chunk that has its text, or in the next one."""
    yield _chunk(reply, {"role": "assistant", "content": ""})
    first = 0
    for place, piece in enumerate(reply.format.pieces(reply.ids[: reply.spoken]), 1):
        if piece:
            yield _chunk(reply, {"content": piece}, _logprobs(reply, first, place))
            first = place
    yield _chunk(reply, {}, _logprobs(reply, first, len(reply.ids)), reply.finish_reason)
    if reply.call.include_usage:
        yield {**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)}


def _chunk(
    reply: Reply, delta: Mapping[str, str], logprobs: Mapping[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if reply.call.logprobs:
        choice["logprobs"] = logprobs
    usage = {"usage": None} if reply.call.include_usage else {}
    return {**_head(reply, "chat.completion.chunk"), "choices": [choice], **usage}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.record, "object": kind, "created": reply.created, "model": reply.call.model}


def _logprobs(reply: Reply, first: int, end: int) -> dict[str, Any]:
    return {"content": [_token(reply, place) for place in range(first, end)]}


def _token(reply: Reply, place: int) -> dict[str, Any]:
    """Some tokens are no whole characters: their text is then a replacement character, and nobody says which bytes."""
    shown: Sequence[int] = reply.ids[place : place + 1]
    return {"token": reply.format.shown(shown), "logprob": reply.logprobs[place], "bytes": None, "top_logprobs": []}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, answer = len(reply.call.prompt.ids), len(reply.ids)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
