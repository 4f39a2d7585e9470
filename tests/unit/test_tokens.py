"""The demo's vocabulary and chat template.

Knows: which characters stand for which ids, written out by hand. Must not know: torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from reef_bus import tokens
from reef_bus.errors import Rejected


def test_every_id_is_one_visible_character_and_comes_back() -> None:
    shown = tokens.decode(range(16))
    assert shown == "0123456789>^$abc"
    assert len(set(shown)) == 16 and shown.isprintable() and " " not in shown
    assert tokens.encode(shown) == tuple(range(16))


@pytest.mark.parametrize("token", [-1, 16, 99])
def test_an_id_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(Rejected, match=str(token)):
        tokens.decode([1, token])


@pytest.mark.parametrize("text", ["x", "1 2", "٣", "²"])
def test_a_character_outside_the_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(Rejected, match="vocabulary"):
        tokens.encode(text)


def test_a_user_message_becomes_bos_digits_sep() -> None:
    assert tokens.render([{"role": "user", "content": "7"}]) == (11, 7, 10)
    assert tokens.render([{"role": "user", "content": "01234567"}]) == (11, 0, 1, 2, 3, 4, 5, 6, 7, 10)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert tokens.render([{"role": "user", "content": parts}]) == (11, 4, 2, 10)


@pytest.mark.parametrize("text", ["", "123456789", "seven", "7 ", "-1", "٣", "²", "1>2"])
def test_a_text_that_is_not_one_to_eight_digits_is_refused_with_what_was_found(text: str) -> None:
    with pytest.raises(Rejected, match="1 to 8 digits") as refused:
        tokens.render([{"role": "user", "content": text}])
    assert repr(text) in str(refused.value)
    assert refused.value.status == 400


def test_a_long_text_is_quoted_in_part() -> None:
    with pytest.raises(Rejected) as refused:
        tokens.render([{"role": "user", "content": "z" * 10_000}])
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("roles", "named"),
    [([], r"\[\]"), (["system", "user"], "system"), (["user", "assistant", "user"], "assistant"), (["tool"], "tool")],
)
def test_a_conversation_that_is_not_one_user_message_is_refused(roles: list[str], named: str) -> None:
    with pytest.raises(Rejected, match=named):
        tokens.render([{"role": role, "content": "7"} for role in roles])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "NoneType"),
        (7, "int"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "text", "text": 7}], "text"),
        (["7"], "str"),
    ],
)
def test_other_content_is_refused_with_its_type(content: object, named: str) -> None:
    with pytest.raises(Rejected, match=named):
        tokens.render([{"role": "user", "content": content}])


def test_an_answer_may_fill_what_the_prompt_leaves() -> None:
    assert tokens.room((11, 7, 10)) == 29
    assert tokens.room((11, 7, 10), max_len=8) == 5
    assert tokens.room(tuple(range(9)), max_len=8) == 0


def test_the_template_needs_no_torch() -> None:
    code = "import sys, reef_bus.tokens; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
