"""Our rendering and decoding, held against transformers' own: the same ids of a conversation, the same text of ids.

Knows: AutoTokenizer. Must not know: SGLang, or how we do it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from consumers.reef_engine.sglang import limits
from consumers.reef_gateway import hugging_face
from reef_bus.errors import Rejected
from tests.chats import ALTERNATING, CHATML, IM_END, LENGTH, byte_fallback, byte_level, qwen2, write, write_chat_folder
from tests.front import fronted, says

MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"))
ANY, QWEN2 = "PreTrainedTokenizerFast", "Qwen2Tokenizer"  # which makes its own, of the file's words and merges
TOKENIZERS = {
    "bytes": (ANY, byte_level()),
    "merges": (ANY, byte_level(MERGES)),
    "fallback": (ANY, byte_fallback()),
    "qwen2": (QWEN2, qwen2(MERGES)),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & here",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER, HELLO = (
    {"role": "user", "content": "hello world, hé e\u0301 😀 <|im_end|> x"},
    {"role": "assistant", "content": " hello\n"},
)
SYSTEM = {"role": "system", "content": "Be  brief.\n"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
}
GAVE = {"role": "tool", "tool_call_id": "1", "content": "12 °C"}

CHATS: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one": (CHATML, [USER], []),
    "system": (CHATML, [SYSTEM, USER], []),
    "turns": (CHATML, [SYSTEM, USER, HELLO, USER], []),
    "tools": (CHATML, [SYSTEM, USER], [WEATHER]),
    "called": (CHATML, [USER, CALLED, GAVE], [WEATHER]),
    "alternating": (ALTERNATING, [USER, HELLO, USER], []),
}


@pytest.fixture(params=TOKENIZERS)
def made(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    """A tokenizer's class, and the tokenizer."""
    return TOKENIZERS[request.param]


@pytest.fixture
def auto(imported: Callable[[str], ModuleType]) -> Callable[[Path], Any]:
    return lambda folder: imported("transformers").AutoTokenizer.from_pretrained(folder)


def theirs(auto: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **variables: Any) -> tuple[int, ...]:
    ids = auto.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False, **variables
    )
    return tuple(ids)


@pytest.mark.parametrize("chat", CHATS)
def test_a_conversation_becomes_the_ids_that_transformers_makes_of_it(
    auto: Callable[[Path], Any], made: tuple[str, Tokenizer], tmp_path: Path, chat: str
) -> None:
    template, messages, tools = CHATS[chat]
    folder = write_chat_folder(tmp_path, template, made[1], tokenizer_class=made[0])
    expected = theirs(auto(folder), messages, tools)
    assert type(auto(folder)).__name__ in (made[0], "TokenizersBackend")
    assert len(expected) > 20
    assert hugging_face.read(folder).render(messages, tools) == expected


def test_arguments_that_a_client_sends_as_json_are_what_a_template_expects(
    auto: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = write_chat_folder(tmp_path)
    function = {"name": "weather", "arguments": json.dumps({"city": "Zürich"})}
    sent = {**CALLED, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    expected = theirs(auto(folder), [USER, CALLED, GAVE], [WEATHER])
    assert hugging_face.read(folder).render([USER, sent, GAVE], [WEATHER]) == expected


def test_variables_reach_the_template(auto: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path)
    expected = theirs(auto(folder), [USER], [], enable_thinking=False)
    assert expected != theirs(auto(folder), [USER], [])
    assert hugging_face.read(folder).render([USER], variables={"enable_thinking": False}) == expected


@pytest.mark.parametrize("messages", [[SYSTEM, USER], [USER, USER]])
def test_what_a_template_refuses_both_refuse_in_its_words(
    auto: Callable[[Path], Any], tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    folder = write_chat_folder(tmp_path, ALTERNATING)
    with pytest.raises(Exception, match="role") as refused:
        theirs(auto(folder), messages, [])
    with pytest.raises(Rejected) as ours:
        hugging_face.read(folder).render(messages)
    assert str(refused.value) in str(ours.value)


def test_templates_lie_where_transformers_puts_them(auto: Callable[[Path], Any], tmp_path: Path) -> None:
    """It saves them as files, also several."""
    before = auto(write_chat_folder(tmp_path / "before", ALTERNATING))
    before.chat_template = {"default": ALTERNATING, "tool_use": CHATML}
    before.save_pretrained(tmp_path / "after")
    write(tmp_path / "after" / "config.json", {"max_position_embeddings": LENGTH})
    assert {path.name for path in (tmp_path / "after").rglob("*.jinja")} == {"chat_template.jinja", "tool_use.jinja"}
    ours, both = hugging_face.read(tmp_path / "after"), auto(tmp_path / "after")
    for tools in ([], [WEATHER]):
        assert ours.render([USER], tools) == theirs(both, [USER], tools)
    assert ours.render([USER], []) != ours.render([USER], [WEATHER])


def test_tokens_that_only_the_configuration_adds_are_there(auto: Callable[[Path], Any], tmp_path: Path) -> None:
    think = {"content": "<think>", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
    folder = write_chat_folder(tmp_path, added_tokens_decoder={"260": {**think, "single_word": False}})
    expected = theirs(auto(folder), [{"role": "user", "content": "<think>"}], [])
    assert 260 in expected and hugging_face.read(folder).render([{"role": "user", "content": "<think>"}]) == expected


def test_a_file_that_asks_for_padding_and_truncation_changes_no_prompt(
    auto: Callable[[Path], Any], tmp_path: Path
) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    folder = write_chat_folder(tmp_path, CHATML, tokenizer)
    assert hugging_face.read(folder).render([USER]) == theirs(auto(folder), [USER], [])


def test_ids_read_as_transformers_reads_them(
    auto: Callable[[Path], Any], made: tuple[str, Tokenizer], tmp_path: Path
) -> None:
    """Whatever a policy may sample, ids included that stand for nothing."""
    folder = write_chat_folder(tmp_path, CHATML, made[1], tokenizer_class=made[0])
    ours, both = hugging_face.read(folder), auto(folder)
    chance = random.Random(7)
    sampled = [[chance.randrange(320) for _ in range(chance.randrange(40))] for _ in range(300)]
    said = [made[1].encode(text).ids for text in ("hello world", "hé 😀", " hello", "a<|im_end|>b<tool_call>c")]
    for ids in itertools.chain(said, sampled):
        assert ours.shown(ids) == both.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.spoken(ids) == both.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(ours.pieces(ids)) == ours.spoken(ids)


@pytest.fixture
async def client(imported: Callable[[str], ModuleType], tmp_path: Path) -> AsyncIterator[Any]:
    """OpenAI's own, before a gateway whose model says "hé", ends, and goes on."""
    openai, model = imported("openai"), hugging_face.read(write_chat_folder(tmp_path / "model"))
    sampled = (*"hé".encode(), IM_END, *b"more")
    async with fronted(tmp_path / "store", model, says(sampled)) as found:
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client:
            yield client


async def test_openais_client_reads_our_models_and_answers(client: Any) -> None:
    [model] = [model async for model in client.models.list()]
    answer = await client.chat.completions.create(model=model.id, messages=[USER], tools=[WEATHER], logprobs=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.usage.completion_tokens) == ("hé", "stop", 4)
    assert [(token.token, token.logprob) for token in choice.logprobs.content][::3] == [
        ("h", 0),
        ("<|im_end|>", -0.375),
    ]


async def test_openais_client_reads_our_streams(client: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    asked = client.chat.completions.with_raw_response.create(model="reef-digit", messages=[USER], **options)
    raw = await asked
    *told, last = [chunk async for chunk in raw.parse()]
    assert [chunk.choices[0].delta.content for chunk in told] == ["", "h", "é", None]
    assert [chunk.choices[0].finish_reason for chunk in told] == [None, None, None, "stop"]
    assert (last.choices, last.usage.completion_tokens, {chunk.id for chunk in told}) == (
        [],
        4,
        {raw.headers["x-reef-agent-record-id"]},
    )


async def test_openais_client_says_what_was_refused(client: Any, imported: Callable[[str], ModuleType]) -> None:
    with pytest.raises(imported("openai").BadRequestError, match="max_tokens is 0"):
        await client.chat.completions.create(model="reef-digit", messages=[USER], max_tokens=0, stream=True)


def test_an_answer_has_the_room_that_the_engine_gives_it() -> None:
    assert hugging_face.RESERVED == limits.RESERVED
