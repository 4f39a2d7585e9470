"""Load ids and derived ids: how they are spelled, and that nothing else is one.

Knows: the spelling. Must not know: what an id names.
"""

from __future__ import annotations

import pytest

from reef_bus.core.ids import LoadId, derived, parse_load_id
from reef_bus.errors import ContractError


def test_a_load_id_is_taken_apart_at_its_last_colon() -> None:
    assert parse_load_id("inc:12") == LoadId("inc", 12) and str(LoadId("inc", 12)) == "inc:12"
    assert parse_load_id("a:b:0") == LoadId("a:b", 0)


@pytest.mark.parametrize("text", ["", "3", ":3", "inc", "inc:", "inc:x", "inc:-1", "inc:03", "inc: 3", "inc:٣"])
def test_what_is_spelled_in_another_way_is_no_load_id(text: str) -> None:
    with pytest.raises(ContractError, match="is not <incarnation>:<sequence>"):
        parse_load_id(text)


def test_a_derived_id_is_the_beginning_of_a_hash_of_its_parts_one_a_line() -> None:
    """By `printf '1\\nbase' | sha256sum`."""
    assert derived("job", 1, "base") == "job-a5ed5b48d0fa3dc9"
