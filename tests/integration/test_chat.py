"""A model with a tokenizer of its own behind a real deployment: conversations in, text and streams out, ids recorded.

Knows: a folder whose every byte is its own token. Must not know: what the policy says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import read_history
from reef_bus.config import Inference
from reef_bus.events import InferenceRecorded
from reef_bus.model_folder import write_model_folder
from reef_bus.policy import PolicyConfig
from reef_bus.samples import TokenRow, decode_rows
from tests.chats import IM_END, IM_START, TOOL_CALL, write_chat_folder
from tests.e2e.live import CONFIG, Live, live

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
PROMPT = (
    *(IM_START, *b"system\nBe brief.", IM_END, *b"\n"),
    *(IM_START, *"user\nhé".encode(), IM_END, *b"\n"),
    *(IM_START, *b"assistant\n"),
)


SPELT = {TOOL_CALL: b"<tool_call>"}
"""The only other token that is text."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder: Path = tmp_path_factory.mktemp("chat")
    model = write_chat_folder(folder / "model")
    write_model_folder(model, PolicyConfig(vocab=320, max_len=512))
    inference = Inference(engines=("engine-0",), model_path=str(model))
    async with live(folder / "state", msgspec.structs.replace(CONFIG, inference=inference), traffic=False) as running:
        yield running


async def ask(found: Live, **fields: Any) -> tuple[str, str]:
    """The receipt and the body."""
    body = {"model": found.running.config.model, "messages": CHAT, "max_tokens": 60, **fields}
    async with found.client.producer.session.post(found.running.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return reply.headers["x-reef-agent-record-id"], await reply.text()


async def row(found: Live, record: str) -> TokenRow:
    store = ArtifactStore(found.running.config.artifact_root())
    events = [recorded.event for recorded in (await read_history(found.running.journal, store)).records]
    [event] = [event for event in events if isinstance(event, InferenceRecorded) and event.record == record]
    return decode_rows(store.get(event.blob.digest))[event.row]


async def test_a_stream_says_what_an_answer_says_and_both_record_what_was_sampled(found: Live) -> None:
    record, body = await ask(found, seed=7)
    streamed, told = await ask(found, seed=7, stream=True)
    choice = json.loads(body)["choices"][0]
    chunks = [json.loads(line.removeprefix("data: ")) for line in told.split("\n\n")[:-2]]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == choice["message"]["content"] and len(pieces) > 10
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    one, other = await row(found, record), await row(found, streamed)
    stopped = choice["finish_reason"] == "stop"
    said = one.answer[:-1] if stopped else one.answer
    assert one == other and one.prompt == PROMPT and IM_END not in said
    assert one.answer[-1] == IM_END if stopped else len(one.answer) == 60
    text = b"".join(bytes([token]) if token < 256 else SPELT.get(token, b"") for token in said)
    assert choice["message"]["content"] == text.decode(errors="replace")


async def test_a_conversation_that_does_not_fit_says_how_much_would(found: Live) -> None:
    body = {"model": found.running.config.model, "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 99}
    async with found.client.producer.session.post(found.running.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 400 and "1 to 91 fit" in await reply.text()
