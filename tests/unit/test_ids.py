"""Load ids and derived ids: how they are spelled, and that nothing else is one.

Knows: the spelling. Must not know: what an id names.
"""

from __future__ import annotations

import pytest

from reef_bus.core.ids import LoadId, adapter_name, derived, parse_adapter_name, parse_load_id
from reef_bus.errors import ContractError, Rejected


def test_a_load_id_is_taken_apart_at_its_last_colon() -> None:
    assert parse_load_id("inc:12") == LoadId("inc", 12) and str(LoadId("inc", 12)) == "inc:12"
    assert parse_load_id("a:b:0") == LoadId("a:b", 0)


@pytest.mark.parametrize(
    "text", ["", "3", ":3", "inc", "inc:", "inc:x", "inc:-1", "inc:03", "inc: 3", "inc:٣", "inc:" + "1" * 4301]
)
def test_what_is_spelled_in_another_way_is_no_load_id(text: str) -> None:
    with pytest.raises(ContractError, match="is not <incarnation>:<sequence>"):
        parse_load_id(text)


def test_a_derived_id_is_the_beginning_of_a_hash_of_its_parts_one_a_line() -> None:
    """By `printf '1\\nbase' | sha256sum`."""
    assert derived("job", 1, "base") == "job-a5ed5b48d0fa3dc9"


def test_an_adapters_name_is_its_scenario_in_base64url_and_its_load_id() -> None:
    """By `printf 'sums of 2' | basenc --base64url`, without padding."""
    assert adapter_name("sums of 2", "k3v9:12") == "reef-adapter-c3VtcyBvZiAy.k3v9.12"
    assert parse_adapter_name("reef-adapter-c3VtcyBvZiAy.k3v9.12") == ("sums of 2", "k3v9:12")


def test_an_incarnation_that_cannot_stand_in_a_url_is_encoded_as_in_a_subject() -> None:
    """By `printf 'a:b' | basenc --base64url`."""
    assert adapter_name("s", "a:b:0") == "reef-adapter-cw.b64-YTpi.0"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "reef-adapter-",
            "l1",
            "c3VtcyBvZiAy.k3v9.12",
            "reef-adapter-c3VtcyBvZiAy",
            "reef-adapter-c3VtcyBvZiAy.12",
        ),
        *(
            "reef-adapter-cw==.k3v9.12",
            "reef-adapter-c w.k3v9.12",
            "reef-adapter-cx.k3v9.12",
            "reef-adapter-_w.k3v9.12",
        ),
        *("reef-adapter-cw.k3v9.012", "reef-adapter-cw.k3v9.-1", "reef-adapter-cw.k3v9.", "reef-adapter-cw..12"),
        *(
            "reef-adapter-cw.k3v9.12.1",
            "reef-adapter-cw.k3v9:12",
            "reef-adapter-cw.b64-azN2OQ.12",
            "reef-adapter-cw.ü.1",
        ),
        *("reef-adapter-cw.k3v9.12\n", "Reef-adapter-cw.k3v9.12", f"reef-adapter-{'YQ' * 130}.k3v9.12"),
        f"reef-adapter-cw.{' ' * 200}.1",
    ],
)
def test_what_is_spelled_in_another_way_is_no_adapters_name(name: str) -> None:
    with pytest.raises(ContractError, match="is not reef-adapter-<base64url scenario>"):
        parse_adapter_name(name)


def test_an_adapter_of_what_is_no_load_id_has_no_name() -> None:
    with pytest.raises(ContractError, match="is not <incarnation>:<sequence>"):
        adapter_name("s", "k3v9")


def test_a_scenario_whose_adapters_no_folder_could_hold_is_refused() -> None:
    """13 for the prefix, 236 for 177 characters, 7 for `.k3v9.1`: one too many."""
    assert len(adapter_name("s" * 176, "k3v9:1")) == 255
    with pytest.raises(Rejected, match="256 characters of an adapter's name, expected 255 at most"):
        adapter_name("s" * 177, "k3v9:1")
