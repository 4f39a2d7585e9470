"""A model folder's own tokenizer and chat template, read as transformers reads them, without transformers.

Knows: the files of such a folder, tokenizers, jinja2. Must not know: requests, engines, records, or HTTP.
Needs the extra `chat`. tests/sglang holds it against transformers' apply_chat_template and decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import lexists
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jinja2 import Template
from tokenizers import AddedToken, Tokenizer

from consumers.reef_gateway.formats import ChatFormat, Message
from consumers.reef_gateway.template import compiled
from reef_bus.errors import Rejected
from reef_bus.tokens import plain_text

RESERVED = 2
"""Positions that SGLang gives to nobody."""
SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

T = TypeVar("T")


class Word(msgspec.Struct, frozen=True):
    """A token as tokenizer_config.json has it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Named(msgspec.Struct, frozen=True):
    """One of several templates."""

    name: str
    template: str


class TokenizerConfig(msgspec.Struct, frozen=True):
    """What of tokenizer_config.json matters; special_tokens_map.json has some of it in older folders."""

    chat_template: str | list[Named] | None = None
    added_tokens_decoder: dict[int, Word] = {}
    bos_token: str | Word | None = None
    eos_token: str | Word | None = None
    unk_token: str | Word | None = None
    sep_token: str | Word | None = None
    pad_token: str | Word | None = None
    cls_token: str | Word | None = None
    mask_token: str | Word | None = None


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """What of generation_config.json matters."""

    eos_token_id: int | list[int] | None = None


class Shape(Ends, frozen=True, kw_only=True):
    """What of config.json matters."""

    max_position_embeddings: int


class HuggingFace(ChatFormat):
    """The template is rendered once for each request, and its text made into ids once. Safe to use from threads."""

    usual = 256

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, Template],
        specials: Mapping[str, str],
        stops: frozenset[int],
        length: int,
    ) -> None:
        self.tokenizer, self.templates, self.specials = tokenizer, templates, specials
        self.stops, self.length = stops, length

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        given = {**self.specials, **(variables or {}), "documents": None, "add_generation_prompt": True}
        given |= {"messages": [_message(message) for message in messages], "tools": list(tools) or None}
        template = self.templates["tool_use" if tools and "tool_use" in self.templates else "default"]
        try:
            ids: list[int] = self.tokenizer.encode(template.render(given), add_special_tokens=False).ids
        except Exception as error:  # somebody else's program, run over what a client has sent
            raise Rejected(f"the model's chat template refuses this conversation: {error}") from error
        if not messages or not ids:
            raise Rejected(f"found {len(messages)} messages that make {len(ids)} tokens; expected at least one of each")
        return tuple(ids)

    def room(self, prompt: Sequence[int]) -> int:
        return max(0, self.length - RESERVED - len(prompt))

    def shown(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def spoken(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def read(folder: Path) -> HuggingFace:
    """Raises Rejected, with the file that is missing or wrong."""
    said = _read(folder / "tokenizer_config.json", TokenizerConfig)
    specials = {**_specials(_read(folder / "special_tokens_map.json", TokenizerConfig)), **_specials(said)}
    tokenizer, shape = _tokenizer(folder / "tokenizer.json", said), _read(folder / "config.json", Shape)
    ends = [_read(folder / "generation_config.json", Ends).eos_token_id, shape.eos_token_id]
    ends.append(tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None)
    stops = {token for end in ends if end is not None for token in (end if isinstance(end, list) else [end])}
    return HuggingFace(tokenizer, _templates(folder, said), specials, frozenset(stops), shape.max_position_embeddings)


def _read(path: Path, kind: type[T]) -> T:
    """What is not there says nothing: then what must be said is missing. A link that leads nowhere is not that: what it
    led to would have said something."""
    try:
        return msgspec.json.decode(path.read_bytes() if lexists(path) else b"{}", type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise Rejected(f"{path} is missing, or not what a model folder has there: {error}") from error


def _specials(said: TokenizerConfig) -> dict[str, str]:
    words = {name: getattr(said, name) for name in SPECIALS}
    return {name: word.content if isinstance(word, Word) else word for name, word in words.items() if word is not None}


def _tokenizer(path: Path, said: TokenizerConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what tokenizers raises has no other name
        raise Rejected(
            f"{path} cannot be read: {error}; AutoTokenizer.from_pretrained(…).save_pretrained(…) writes such a file"
        ) from error
    tokenizer.no_truncation()  # a file may ask for either, and transformers takes both back for a chat
    tokenizer.no_padding()
    words = sorted(said.added_tokens_decoder.items())
    tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(word)) for _, word in words])
    for id_, word in words:
        if (found := tokenizer.token_to_id(word.content)) != id_:
            raise Rejected(f"{path} has {word.content!r} as {found}; tokenizer_config.json beside it says {id_}")
    return tokenizer


def _templates(folder: Path, said: TokenizerConfig) -> dict[str, Template]:
    """By name. Files go before what tokenizer_config.json has, as with transformers."""
    files = [*folder.glob("additional_chat_templates/*.jinja"), *filter(lexists, [folder / "chat_template.jinja"])]
    found = {path.stem: _text(path) for path in files}
    found |= {"default": found.pop("chat_template")} if "chat_template" in found else {}
    if not found:
        written = said.chat_template or []
        found = {"default": written} if isinstance(written, str) else {each.name: each.template for each in written}
    if "default" not in found:
        raise Rejected(
            f"{folder} has a tokenizer and no chat template: put one there as chat_template.jinja; a model that was "
            "not made for chats has none of its own"
        )
    return {name: compiled(text, f"{folder}, {name}") for name, text in found.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Rejected(f"{path} cannot be read: {error}; a chat template is a file in UTF-8") from error


def _message(message: Message) -> dict[str, Any]:
    """As the template expects it: content as one text, a tool's arguments as values, which the API has as JSON."""
    if not isinstance(message.get("role"), str):
        raise Rejected(f"found a message with role {message.get('role')!r}; expected system, user, assistant or tool")
    found = dict(message)
    if found.get("content") is not None:
        found["content"] = plain_text(found["content"])
    if calls := found.get("tool_calls"):
        if not isinstance(calls, list):
            raise Rejected(f"found tool_calls of type {type(calls).__name__}; expected a list")
        found["tool_calls"] = [_tool_call(call) for call in calls]
    return found


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise Rejected(f"the arguments of a tool call are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
