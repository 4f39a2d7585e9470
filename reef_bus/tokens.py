"""The demo policy's sixteen tokens and its chat template.

Knows: which character each id stands for and which conversations the policy can read.
Must not know: torch, HTTP, or where a conversation came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reef_bus.errors import Rejected

SEP, BOS, EOS = 10, 11, 12
MAX_DIGITS = 8
MAX_LEN = 32  # prompt and answer together: the policy has no positions beyond

# One visible character per id, so that any answer of an untrained policy can be shown and read back without loss.
CHARACTERS = "0123456789>^$abc"
VOCAB = len(CHARACTERS)

_IDS = {character: token for token, character in enumerate(CHARACTERS)}
_DIGITS = frozenset(CHARACTERS[:SEP])


def encode(text: str) -> tuple[int, ...]:
    """One id per character; the inverse of `decode`. Raises Rejected on a character outside the vocabulary."""
    for character in text:
        if character not in _IDS:
            raise Rejected(f"character {character!r} is not in the vocabulary; use only {CHARACTERS!r}")
    return tuple(_IDS[character] for character in text)


def decode(ids: Iterable[int]) -> str:
    """One character per id; the inverse of `encode`. Raises Rejected on an id outside 0..15."""
    found = tuple(ids)
    for token in found:
        if not 0 <= token < VOCAB:
            raise Rejected(f"token id {token} is not in the vocabulary; ids go from 0 to {VOCAB - 1}")
    return "".join(CHARACTERS[token] for token in found)


def render(messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """The prompt `[bos, digits…, sep]` of a conversation that is one user message of 1 to 8 digits.

    Anything else raises Rejected. System messages and earlier turns are refused rather than dropped: the policy
    cannot read them, and an answer that silently ignored them would look like an answer to them.
    """
    if len(messages) != 1 or messages[0].get("role") != "user":
        roles = [message.get("role") for message in messages]
        raise Rejected(f"found messages with roles {roles}; this model reads exactly one message, of role 'user'")
    text = plain_text(messages[0].get("content"))
    if not 1 <= len(text) <= MAX_DIGITS or not _DIGITS.issuperset(text):
        raise Rejected(f"found the user text {_short(text)}; this model reads 1 to {MAX_DIGITS} digits, such as '7'")
    return BOS, *encode(text), SEP


def room(prompt: Sequence[int], max_len: int = MAX_LEN) -> int:
    """How many tokens an answer to `prompt` may have at most."""
    return max(0, max_len - len(prompt))


def plain_text(content: object) -> str:
    """A message's content: a string, or text parts joined. Raises Rejected for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Rejected(f"found content of type {type(content).__name__}; expected a string or a list of text parts")
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise Rejected(f"found a content part of type {kind!r}; this model reads parts of type 'text' with a string")
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
