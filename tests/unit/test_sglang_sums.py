"""Who works out an SGLang server's sums: asked by question and answer, over processes that answer as a test says.

Knows: the oracle's protocol. Must not know: SGLang, which need not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from consumers.reef_engine.sglang import sums
from consumers.reef_engine.sglang.sums import Oracle, Sums
from reef_bus.errors import TransferError, Unavailable

WORKER = """
import json, os, sys, time
print("what is imported prints")
rank, out = int(sys.argv[1]), os.fdopen(int(sys.argv[3]), "w")
for line in sys.stdin:
    name = json.loads(line).rpartition("/")[2]
    said = {"sums": {"rank": rank, "algorithm": "x-64", "sums": {"a": name}}}
    if name == "half" and rank == 0:
        said = {"error": "not of this model"}
    if name == "more":
        said["unread"] = ["everywhere", f"only in {rank}"]
    if name == "slow":
        time.sleep(60)
    if name == "end":
        sys.exit(1)
    print(json.dumps(said), file=out, flush=True)
"""


@pytest.fixture
def oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Oracle]:
    (tmp_path / "worker_of_a_test.py").write_text(WORKER)
    monkeypatch.setattr(sums, "WORKER", "worker_of_a_test")
    found = Oracle([], 2, 1, {**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path / "log")
    yield found
    found.close()


def expected(name: str) -> list[Sums]:
    return [Sums(rank, "x-64", {"a": name}) for rank in (0, 1)]


def test_an_answer_is_of_the_version_that_was_asked_for_also_after_a_refusal(oracle: Oracle) -> None:
    with pytest.raises(TransferError, match="mismatch: not of this model"):
        oracle.expected(Path("half"))
    for name in ("one", "other"):
        assert oracle.expected(Path(name)) == expected(name)


def test_a_tensor_of_which_no_rank_makes_anything_is_no_part_of_the_model(oracle: Oracle) -> None:
    with pytest.raises(TransferError, match=r"mismatch: .* tensor 'everywhere': leave it out"):
        oracle.expected(Path("more"))


@pytest.mark.parametrize(
    ("name", "limit_s", "said"),
    [("slow", 0.5, "gives no answer; see .*log"), ("end", 30.0, "has ended; see .*log")],
)
def test_who_gives_no_answer_is_not_waited_for(oracle: Oracle, name: str, limit_s: float, said: str) -> None:
    oracle.expected(Path("up"))
    with pytest.raises(Unavailable, match=said):
        oracle.expected(Path(name), limit_s=limit_s)
