"""The table of subjects: one spelling per family, lossless tokens, one writer each.

Knows: protocol.md section 2. Must not know: a broker client.
"""

from __future__ import annotations

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from reef_bus.errors import ContractError, Rejected
from reef_bus.topology import (
    FAMILIES,
    check_name,
    compare_filter,
    parse,
    permissions,
    plain,
    stream_name,
    streams,
    subject,
    telemetry_subject,
    token,
)
from tests.facts import E0, dispatched, fenced, opened, target


def test_a_subject_names_deployment_family_id_and_event() -> None:
    assert subject("demo", dispatched("j")) == "reef.demo.train.digit.JobDispatched"
    assert subject("demo", target(1, "c", E0)) == "reef.demo.release.digit.TargetPersisted"
    assert subject("demo", fenced("e0", 1)) == "reef.demo.engine.e0.EngineFenced"
    assert subject("demo", opened()) == "reef.demo.deployment._.LogOpened"


def test_the_filter_is_the_familys_row() -> None:
    """Section 2: only engines are compared per id."""
    assert compare_filter("demo", dispatched("j")) == "reef.demo.train.>"
    assert compare_filter("demo", target(1, "c", E0)) == "reef.demo.release.>"
    assert compare_filter("demo", fenced("e0", 1)) == "reef.demo.engine.e0.>"
    assert compare_filter("demo", opened()) == "reef.demo.deployment.>"


def test_a_subject_is_taken_apart_again() -> None:
    found = parse("reef.demo.engine.e0.EngineFenced")
    assert (found.deployment, found.family, found.id, found.name) == ("demo", "engine", "e0", "EngineFenced")


@pytest.mark.parametrize(
    "text",
    [
        *("", "reef.d.train.x", "other.d.train.x.JobDropped", "reef.d.unheard.x.JobDropped"),
        *("reef.d.train.x y.JobDropped", "reef.d.train.*.JobDropped", "reef.d.train.x.JobDropped.more"),
        "reef.d.train..JobDropped",
    ],
)
def test_a_subject_that_is_not_ours(text: str) -> None:
    with pytest.raises(ContractError, match="form"):
        parse(text)


@for_all(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_every_id_makes_one_token_and_comes_back(text: str) -> None:
    found = token(text)
    assert plain(found) == text
    assert not set(found) & set(" .*>\t\r")


@pytest.mark.parametrize("text", ["digit", "A-b_9", "x" * 64])
def test_a_plain_id_stays_readable(text: str) -> None:
    assert token(text) == text


@for_all(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), unique=True, max_size=6))
def test_two_ids_never_share_a_token(texts: list[str]) -> None:
    assert len({token(text) for text in texts}) == len(texts)


def test_an_id_that_looks_encoded_is_encoded() -> None:
    assert token("b64-abc") != "b64-abc" and plain(token("b64-abc")) == "b64-abc"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a>", "*", "x" * 65, "ü", "a/b"])
def test_a_name_that_cannot_stand_in_a_subject_is_rejected(name: str) -> None:
    with pytest.raises(Rejected, match="expected 1 to 64"):
        check_name("engine", name)
    assert check_name("engine", "gpu-0_a") == "gpu-0_a"


def test_one_family_one_writer() -> None:
    """Rule 4, and the table of section 2."""
    rows = {f.name: (f.writer, f.stream, f.per_id, f.compares) for f in FAMILIES.values()}
    assert rows == {
        "train": ("trainer", "LOG", False, True),
        "release": ("publisher", "LOG", False, True),
        "engine": ("engine", "LOG", True, True),
        "deployment": ("supervisor", "LOG", False, True),
        "operator": ("person", "LOG", True, False),
        "record": ("gateway", "RECORDS", True, False),
        "site": ("relay", "SITES", True, True),
    }


def test_a_role_may_publish_to_its_family_and_its_telemetry_only() -> None:
    assert permissions("demo", "trainer") == ("reef.demo.train.>", "reef.demo.tel.trainer.>")
    assert permissions("demo", "engine", "e0") == ("reef.demo.engine.e0.>", "reef.demo.tel.engine.>")
    assert permissions("demo", "publisher", "p1") == ("reef.demo.release.>", "reef.demo.tel.publisher.>")
    assert permissions("demo", "stranger") == ("reef.demo.tel.stranger.>",)


def test_streams_keep_everything_but_telemetry() -> None:
    """Section 2: LOG is never trimmed; telemetry lives in memory with a short age."""
    found = {spec.name: spec for spec in streams("demo", replicas=3)}
    log = found[stream_name("demo", "LOG")]
    assert set(log.subjects) == {f"reef.demo.{f}.>" for f in ("train", "release", "engine", "deployment", "operator")}
    assert (log.keeps, log.memory, log.max_age_s, log.replicas) == (True, False, 0, 3)
    assert found[stream_name("demo", "RECORDS")].subjects == ("reef.demo.record.>",)
    copy = found[stream_name("demo", "RELEASES")]
    assert (copy.source, copy.source_filter, copy.subjects) == (log.name, "reef.demo.release.>", ())
    telemetry = found[stream_name("demo", "TELEMETRY")]
    assert telemetry.memory and not telemetry.keeps and 0 < telemetry.max_age_s <= 3600


def test_streams_share_no_subject() -> None:
    subjects = [s for spec in streams("demo") for s in spec.subjects]
    assert len(subjects) == len(set(subjects))
    assert telemetry_subject("demo", "engine", "a b") == f"reef.demo.tel.engine.{token('a b')}"
