"""A model folder's own tokens at the gateway: ids made once, text that ends where the answer ends, streams.

Knows: folders with a tokenizer of bytes, whose ids the tests work out by hand. Must not know: transformers
(tests/sglang holds our reading of a folder against it), or a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given as holds
from hypothesis import strategies as some

from consumers.reef_gateway import role as role_module
from consumers.reef_gateway import router as router_module
from consumers.reef_gateway.chat import parse
from consumers.reef_gateway.formats import DIGITS, HELD, ChatFormat
from consumers.reef_gateway.hugging_face import HuggingFace, read
from reef_bus.backends import Generated, Prompt
from reef_bus.config import Config, Inference
from reef_bus.core.membership import Engine
from reef_bus.errors import Rejected
from tests.chats import (
    ALTERNATING,
    END_OF_TEXT,
    IM_END,
    IM_START,
    LENGTH,
    TOOL_CALL,
    byte_fallback,
    byte_level,
    write,
    write_chat_folder,
)
from tests.front import Front, Hands, fronted, says
from tests.loop import until

USER = {"role": "user", "content": "7é"}
PROMPT = (IM_START, *b"user\n7", 0xC3, 0xA9, IM_END, *b"\n", IM_START, *b"assistant\n")
"""`USER` in the template of `tests.chats.CHATML`: every byte is its own id."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "BACK_OFF_S", 0.005)


@pytest.fixture
def model(tmp_path: Path) -> HuggingFace:
    return read(write_chat_folder(tmp_path / "model"))


# -- a conversation becomes ids


def asked(format: ChatFormat, **fields: Any) -> Prompt:
    body = {"model": "m", "messages": [USER], **fields}
    return parse(json.dumps(body).encode(), "m", format).prompt


def test_a_conversation_is_the_templates_text_in_ids(model: HuggingFace) -> None:
    assert asked(model).ids == PROMPT
    assert model.shown(PROMPT) == "<|im_start|>user\n7é<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined_and_others_refused(model: HuggingFace) -> None:
    parts = [{"type": "text", "text": "7"}, {"type": "text", "text": "é"}]
    assert asked(model, messages=[{"role": "user", "content": parts}]).ids == PROMPT
    with pytest.raises(Rejected, match="image_url"):
        asked(model, messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_tools_are_told_to_the_model_unless_it_shall_use_none(model: HuggingFace) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    with_tools = asked(model, tools=[tool], tool_choice="auto")
    assert '{"name": "weather", "parameters": {}}' in model.shown(with_tools.ids)
    assert asked(model, tools=[tool], tool_choice="none").ids == asked(model, tools=[]).ids == PROMPT


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_never_forced(model: HuggingFace, choice: Any) -> None:
    with pytest.raises(Rejected, match="tool_choice"):
        asked(model, tool_choice=choice)


@pytest.mark.parametrize("given_by", [{"tools": [{"type": "function"}]}, {"chat_template_kwargs": {"a": 1}}])
def test_the_demos_model_reads_no_tools(given_by: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="tools"):
        asked(DIGITS, messages=[{"role": "user", "content": "7"}], **given_by)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "x"}, "role None"),
        ({"role": 7, "content": "x"}, "role 7"),
        ({"role": "user", "content": 7}, "int"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls of type str"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": "{"}}]}, "not JSON"),
        ({"role": "assistant", "tool_calls": [7]}, "the model's chat template refuses this conversation"),
        ({"role": "user", "content": "x"}, "System role not supported"),
    ],
)
def test_what_the_template_cannot_take_is_the_clients_mistake(
    tmp_path: Path, model: HuggingFace, message: dict[str, Any], says: str
) -> None:
    strict = read(write_chat_folder(tmp_path / "strict", ALTERNATING))
    with pytest.raises(Rejected, match=says) as refused:
        if says.startswith("System"):
            asked(strict, messages=[{"role": "system", "content": "Be brief"}, message])
        else:
            asked(model, messages=[message])
    assert refused.value.status == 400


def test_a_conversation_without_messages_is_refused(model: HuggingFace) -> None:
    with pytest.raises(Rejected):
        asked(model, messages=[])


@pytest.mark.parametrize("escape", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{% for %}"])
def test_a_template_is_kept_in_a_sandbox(tmp_path: Path, escape: str) -> None:
    with pytest.raises(Rejected, match="template"):
        asked(read(write_chat_folder(tmp_path, "a" + escape)))


def test_an_answer_fits_what_the_prompt_leaves(model: HuggingFace) -> None:
    room = LENGTH - 2 - len(PROMPT)
    assert asked(model, max_tokens=room).max_tokens == room
    assert asked(model).max_tokens == 256
    with pytest.raises(Rejected, match=f"1 to {room} fit"):
        asked(model, max_tokens=room + 1)
    left = LENGTH - 2 - len(PROMPT) - 9
    assert asked(model, messages=[{"role": "user", "content": "7é" + "x" * left}]).max_tokens == 9
    with pytest.raises(Rejected, match="0 fit"):
        asked(model, messages=[{"role": "user", "content": "x" * LENGTH}])


# -- the folder


def test_an_answer_ends_with_any_token_that_some_file_calls_an_end(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, eos_token={"content": "<tool_call>"})
    write(folder / "generation_config.json", {"eos_token_id": [END_OF_TEXT, 7]})
    assert read(folder).stops == {TOOL_CALL, END_OF_TEXT, 7, IM_END}


def deployed(folder: Path) -> Config:
    return Config(inference=Inference(model_path=str(folder)))


def test_the_demos_tokens_are_for_folders_without_a_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"vocab_size": 16})
    assert role_module._format(Config()) is DIGITS and role_module._format(deployed(tmp_path)) is DIGITS
    assert isinstance(role_module._format(deployed(write_chat_folder(tmp_path))), HuggingFace)


def test_a_real_model_without_its_tokenizer_is_not_taken_for_the_demos(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"vocab_size": 320})
    with pytest.raises(Rejected, match="320"):
        role_module._format(deployed(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: write_chat_folder(folder, None), "no chat template"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("["), "tokenizer_config.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json.*max_position_embeddings"),
        (lambda folder: write_chat_folder(folder, added_tokens_decoder={"9": {"content": "<x>"}}), "says 9"),
        (lambda folder: write_chat_folder(folder, "{% for %}"), "cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").symlink_to("nowhere"), "chat_template.jinja cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").mkdir(), "chat_template.jinja cannot be read"),
        (
            lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xfc"),
            "chat_template.jinja cannot be read.*UTF-8",
        ),
        (lambda folder: (folder / "generation_config.json").symlink_to("nowhere"), "generation_config.json is missing"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, change: Callable[[Path], Any], says: str
) -> None:
    change(write_chat_folder(tmp_path))
    with pytest.raises(Rejected, match=says):
        role_module._format(deployed(tmp_path))


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("consumers.reef_gateway.hugging_face")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Rejected, match=r"reef-bus\[chat\]"):
        role_module._format(deployed(write_chat_folder(tmp_path)))


@pytest.mark.parametrize(("folder", "wanted"), [(False, set()), (True, {"tokenizers", "jinja2"})])
def test_a_gateway_imports_a_tokenizer_only_for_a_model_that_has_one(
    tmp_path: Path, folder: bool, wanted: set[str]
) -> None:
    path = str(write_chat_folder(tmp_path)) if folder else ""
    code = (
        "import sys; from consumers.reef_gateway.role import _format; from reef_bus.config import Config, Inference\n"
        f"_format(Config(inference=Inference(model_path={path!r})))\n"
        "print(*{'torch', 'transformers', 'tokenizers', 'jinja2'} & {m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == wanted


# -- ids become text


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFormat]:
    """By name."""
    folder = tmp_path_factory.mktemp("models")
    made = {"bytes": byte_level((("Ã", "©"), ("ð", "Ł"))), "fallback": byte_fallback()}
    found = {name: read(write_chat_folder(folder / name, tokenizer=each)) for name, each in made.items()}
    return {**found, "digits": DIGITS}


def test_a_character_of_several_tokens_comes_with_its_last(formats: dict[str, ChatFormat]) -> None:
    ids = (*b"h", 0xC3, 0xA9, *b" ", *"😀".encode(), IM_START, *b"!")
    assert list(formats["bytes"].pieces(ids)) == ["h", "", "é", " ", "", "", "", "😀", "", "!"]


def test_bytes_that_are_no_character_are_shown_as_such(formats: dict[str, ChatFormat]) -> None:
    assert list(formats["bytes"].pieces((*b"a", 0xE2, 0x82))) == ["a", "�", ""]
    assert "".join(formats["bytes"].pieces((0xFF, 0xC3, *b"b"))) == "��b"


def test_a_space_belongs_to_the_word_after_it(formats: dict[str, ChatFormat]) -> None:
    """Read alone, a word of this kind has lost its space."""
    hello, wo, smile = 271, 272, (5 + 0xF0, 5 + 0x9F, 5 + 0x98, 5 + 0x80)
    assert formats["fallback"].spoken((wo,)) == "wo"
    assert list(formats["fallback"].pieces((hello, wo, wo, *smile))) == ["hello", " wo", " wo", "", "", "", "😀"]


@pytest.mark.parametrize(("name", "top"), [("bytes", 262), ("fallback", 280), ("digits", 16)])
@holds(data=some.data())
def test_pieces_make_up_the_text_and_break_no_character(
    formats: dict[str, ChatFormat], data: some.DataObject, name: str, top: int
) -> None:
    """Of any ids that a policy could sample."""
    format = formats[name]
    text = data.draw(some.text(max_size=12)).encode() if name == "bytes" else b""
    ids = (*data.draw(some.lists(some.integers(0, top - 1), max_size=60)), *text)
    pieces = list(format.pieces(ids))
    assert len(pieces) == len(ids) and "".join(pieces) == format.spoken(ids)
    if "�" not in format.spoken(ids):
        assert not any("�" in piece for piece in pieces)


def test_a_long_run_without_a_character_costs_no_more_for_each_token(formats: dict[str, ChatFormat]) -> None:
    read_at_once = []

    class Counting(type(formats["bytes"])):  # type: ignore[misc]
        def spoken(self, ids: Sequence[int]) -> str:
            read_at_once.append(len(ids))
            return str(super().spoken(ids))

    format, base = Counting.__new__(Counting), formats["bytes"]
    format.__dict__.update(base.__dict__)
    ids = (IM_START,) * 500 + tuple(b"end")
    assert "".join(format.pieces(ids)) == "end"
    assert sorted(read_at_once)[-2] <= 2 * HELD  # all of it is read once


# -- what is recorded, and what is told


Fronts = Callable[..., Awaitable[Front]]


@pytest.fixture
async def front(tmp_path: Path, model: HuggingFace) -> AsyncIterator[Fronts]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(hands: Hands, timeout_s: float = 30.0) -> Front:
            return await stack.enter_async_context(fronted(tmp_path / "store", model, hands, timeout_s))

        yield start


async def ask(found: Front, **fields: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    return await found.ask(**{"messages": [USER], **fields})


SAMPLED = (*b"h", 0xC3, 0xA9, IM_END, *b"x", 0xFF, END_OF_TEXT)
"""An answer of two characters, its end, and what was sampled after it."""


async def test_an_answer_ends_with_its_stop_token_and_the_record_holds_what_was_sampled(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    reply, body = await ask(found, logprobs=True)
    answer = json.loads(body)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hé"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    told = [(each["token"], each["logprob"]) for each in answer["choices"][0]["logprobs"]["content"]]
    assert told == [("h", 0.0), ("�", -0.125), ("�", -0.25), ("<|im_end|>", -0.375)]
    assert answer["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 4, "total_tokens": len(PROMPT) + 4}
    [row], [event], [asked] = found.rows(), found.events(), found.router.asked
    assert (row.prompt, row.answer) == (PROMPT, SAMPLED)  # of an engine that does not stop
    assert asked.ids == PROMPT and asked.stop_ids == (IM_END,)
    assert (event.record, event.answer_tokens) == (reply.headers["x-reef-agent-record-id"], 7)
    assert event.answer == "hé<|im_end|>x�<|endoftext|>"


async def test_an_answer_that_does_not_end_is_as_long_as_it_was_allowed_to_be(front: Fronts) -> None:
    found = await front(says(b"hello"))
    answer = json.loads((await ask(found))[1])
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 5)


async def test_nothing_is_ever_tokenized_again(front: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation is one rendering; the answer's ids need not be those that its text would give."""
    rendered: list[Any] = []
    render = HuggingFace.render
    monkeypatch.setattr(HuggingFace, "render", lambda *args: rendered.append(args[1]) or render(*args))
    ids = (*b"<|im_start|>", 0xFF)  # spelt in bytes: made of its text, it would be another token
    found = await front(says(ids, ["inc:9", "inc:9", "inc:0"]))
    for stream in (False, True):
        await ask(found, stream=stream)
    assert rendered == [[USER], [USER]] and len(found.router.asked) == 4
    assert [row.answer for row in found.rows()] == [ids, ids]


async def test_a_long_conversation_is_recorded_with_its_beginning(front: Fronts, model: HuggingFace) -> None:
    """An event has 64 KiB; answers to other prompts that begin alike stay told apart."""
    model.length = 200_000
    found = await front(says(b"\x01" * 40_000))
    for last in ("a", "b", "b"):
        reply, body = await ask(found, messages=[{"role": "user", "content": "\x01" * 100_000 + last}])
        assert reply.status == 200, body
    first, second, third = (event.prompt for event in found.events())
    assert first != second == third and first.startswith("<|im_start|>user\n\x01\x01")
    assert all(len(msgspec.json.encode(event)) < 40_000 for event in found.events())
    assert [len(row.answer) for row in found.rows()] == [40_000] * 3


# -- streams


def chunks(body: bytes) -> list[dict[str, Any]]:
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: {") for line in lines[:-2])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_stream_is_a_role_pieces_of_text_and_an_end(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    reply, body = await ask(found, stream=True)
    told = chunks(body)
    assert [chunk["choices"][0]["delta"] for chunk in told] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in told} == {"chat.completion.chunk"} and "usage" not in told[0]
    [event] = found.events()
    assert {chunk["id"] for chunk in told} == {event.record} == {reply.headers["x-reef-agent-record-id"]}
    assert (reply.headers["x-reef-load-id"], reply.content_type) == ("inc:0", "text/event-stream")
    assert found.rows()[0].answer == SAMPLED


async def test_a_stream_says_what_it_cost_when_asked(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    told = chunks((await ask(found, stream=True, stream_options={"include_usage": True}))[1])
    assert [chunk["usage"] for chunk in told[:-1]] == [None] * 4 and told[-1]["choices"] == []
    assert told[-1]["usage"] == json.loads((await ask(found))[1])["usage"]


async def test_options_of_a_stream_are_refused_without_one(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    reply, body = await ask(found, stream_options={"include_usage": True})
    assert reply.status == 400 and b"stream_options" in body and found.events() == []


async def test_a_stream_has_the_logprob_of_every_token_once(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    told = chunks((await ask(found, stream=True, logprobs=True))[1])
    assert told[0]["choices"][0]["logprobs"] is None
    by_chunk = [[each["logprob"] for each in chunk["choices"][0]["logprobs"]["content"]] for chunk in told[1:]]
    assert by_chunk == [[0.0], [-0.125, -0.25], [-0.375]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_by_a_release_that_nobody_committed_is_asked_again(front: Fronts, stream: bool) -> None:
    found = await front(says(SAMPLED, ["inc:9", "inc:0"]))
    reply, _ = await ask(found, stream=stream)
    assert (reply.status, reply.headers["x-reef-load-id"]) == (200, "inc:0")
    assert [event.load_id for event in found.events()] == ["inc:0"] and len(found.router.asked) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_never_hold_are_a_503_in_time_and_no_record(front: Fronts, stream: bool) -> None:
    found = await front(says(SAMPLED, ["inc:9"]), 0.5)
    reply, body = await ask(found, stream=stream)
    assert (reply.status, reply.content_type) == (503, "application/json") and b"0.5 s" in body
    assert found.events() == [] and len(found.router.asked) > 2


async def test_a_refused_stream_is_a_plain_400(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    reply, body = await ask(found, stream=True, max_tokens=0)
    assert (reply.status, reply.content_type) == (400, "application/json") and b"max_tokens is 0" in body


async def connected(found: Front, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has asked, and reads little: its socket holds 4 KiB."""
    body = json.dumps({"model": "reef-digit", "messages": [USER], "stream": True, **fields}).encode()
    port = int(found.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    await writer.drain()
    return reader, writer


async def test_a_client_that_goes_away_before_its_answer_is_recorded_leaves_nothing(front: Fronts) -> None:
    release = asyncio.Event()

    async def hold(engine: Engine, prompt: Prompt) -> Generated:
        await release.wait()
        return await says(SAMPLED)(engine, prompt)

    found = await front(hold)
    _, writer = await connected(found)
    await until(lambda: len(found.router.asked) == 1)
    writer.transport.abort()
    await until(lambda: not found.router.in_flight)
    release.set()
    await asyncio.sleep(0.05)
    assert found.events() == []


LONG = b"long" * 25_000  # some 20 MB as a stream: more than sockets take


async def test_a_client_that_goes_away_while_it_is_told_leaves_a_whole_record(front: Fronts) -> None:
    found = await front(says(LONG))
    reader, writer = await connected(found)
    assert await reader.readuntil(b'{"content":"l"}')
    writer.transport.abort()
    await until(lambda: len(found.events()) == 1)
    assert found.rows()[0].answer == tuple(LONG)
    assert (await ask(found))[0].status == 200


async def test_a_client_that_does_not_read_is_let_go_of_and_cannot_take_its_stream_for_whole(front: Fronts) -> None:
    found = await front(says(LONG), 0.5)
    reader, writer = await connected(found)
    await reader.readuntil(b'{"content":"l"}')
    await asyncio.sleep(1.0)
    told = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(5):
            told = await reader.read(-1)
    assert b"[DONE]" not in told and len(found.events()) == 1
    writer.close()


async def test_the_model_is_listed(front: Fronts) -> None:
    found = await front(says(SAMPLED))
    async with found.session.get(f"{found.url}/v1/models") as reply:
        listed = await reply.json()
    [named] = listed["data"]
    assert listed["object"] == "list" and (named["id"], named["object"], named["owned_by"]) == (
        "reef-digit",
        "model",
        "reef",
    )
    assert isinstance(named["created"], int)


async def test_a_long_body_is_read_beside_the_loop(front: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long enough to be felt by every other request, and by the fold."""
    found = await front(says(SAMPLED))
    beside: list[bool] = []
    render = HuggingFace.render

    def seen(*args: Any) -> tuple[int, ...]:
        beside.append(threading.current_thread() is not threading.main_thread())
        return render(*args)

    monkeypatch.setattr(HuggingFace, "render", seen)
    for size in (10, 20_000):
        await ask(found, messages=[{"role": "user", "content": " " * size}])
    assert beside == [False, True]
