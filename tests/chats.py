"""Model folders with a small tokenizer and a chat template, and nothing to generate with.

Knows: the files of such a folder, and the alphabet of byte-level BPE. Must not know: who reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

END_OF_TEXT, IM_START, IM_END, TOOL_CALL = 256, 257, 258, 259
CONTROL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
LENGTH = 2048

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""As Qwen's: a system message, tools, what was called and what it gave."""

ALTERNATING = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}
    {% else %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% endif %}
{% endfor %}
"""
"""As Gemma's and Mistral's: rules about roles, tokens by name, and what the assistant said marked."""


def alphabet() -> dict[str, int]:
    """Of byte-level BPE, by GPT-2's rule: a byte that is printable in Latin-1 stands for itself, the others, in order,
    for what follows U+0100. Here each one's id is the byte itself."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def byte_level(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """256 bytes, and four tokens beyond: three of control and one to be read. Merges make longer ones after those."""
    vocab = alphabet()
    found = {left + right: 260 + n for n, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **reserved(), **found}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in CONTROL])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def qwen2(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """With what is particular about Qwen's: composed characters, and its own idea of a word."""
    tokenizer = byte_level(merges)
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def reserved() -> dict[str, int]:
    return {**CONTROL, "<tool_call>": TOOL_CALL}


def byte_fallback() -> Tokenizer:
    """As Llama's first ones: words with ▁ for a space before them, and bytes for what is in no word."""
    words = [
        "<unk>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        *(f"<0x{n:02X}>" for n in range(256)),
    ]
    words += ["▁", "h", "e", "l", "o", "w", "▁w", "he", "ll", "hell", "hello", "▁wo"]  # from 261 on
    merges = [("▁", "w"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁w", "o")]
    vocab = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(plain)
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in CONTROL])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def write_chat_folder(
    folder: Path, template: str | None = CHATML, tokenizer: Tokenizer | None = None, **config: Any
) -> Path:
    """`config`: further keys of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **config}
    write(folder / "tokenizer_config.json", said if template is None else {**said, "chat_template": template})
    shape = {"model_type": "qwen3", "vocab_size": 320, "max_position_embeddings": LENGTH, "eos_token_id": IM_END}
    write(folder / "config.json", shape)
    return folder


def write(path: Path, said: Any) -> None:
    path.write_text(json.dumps(said), "utf-8")
