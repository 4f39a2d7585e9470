"""The whole loop over two real SGLang servers, through three kills: a policy that learns while it serves, and two
adapters over a base that is frozen.

Knows: the demo as a person runs it, and every record that it leaves. Must not know: how any of it is done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from pytest import CaptureFixture

from consumers.reef_engine.sglang.launch import SHIMS
from reef_bus.policy import PolicyConfig
from tests.watched import Watched, asked, ran, require_every_token_to_be_the_trainers

SHAPE = PolicyConfig(qk_norm=True)

RELEASES, OF_ADAPTERS = 8, 12
WHOLE = ("engine-0@EngineFenced", "trainer@SenderReady", "publisher@ReceiverVerified")
ADAPTERS = ("engine-0@EngineStaged", "trainer@TargetPersisted", "publisher@EngineStaged")


def run(
    folder: Path, capsys: CaptureFixture[str], kills: tuple[str, ...], releases: int, *words: str
) -> tuple[Watched, dict[str, Any]]:
    """Through the kills, and no process is left."""
    ordered = [word for kill in kills for word in ("--kill", kill)]
    all_words = ["--engine", "sglang", "--releases", str(releases), "--keep", str(folder), "--json", *ordered, *words]
    demo, others = Watched(*asked(all_words)), psutil.Process().children(recursive=True)
    said = ran(demo, capsys)
    assert {f"{kill['component']}@{kill['event']}" for kill in said["kills"]} == set(kills)
    assert (said["audit_violations"], said["engines"], said["releases"] >= releases) == (0, 2, True)
    assert said["seconds"] < 600 and len(demo.greedy) > releases // 2
    left = demo.processes.difference(others)  # servers, and whatever they started
    assert len(left) > 6 and not psutil.wait_procs(left, timeout=10)[1]
    return demo, said


def test_a_policy_learns_on_two_real_servers_through_three_kills(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    demo, said = run(tmp_path / "demo", capsys, WHOLE, RELEASES)
    assert said["reward_last"] > said["reward_first"] + 0.1
    assert demo.sampled().keys() == demo.releases.keys()  # every release has answered
    require_every_token_to_be_the_trainers(demo, SHAPE)


def test_two_adapters_learn_over_one_base_on_two_real_servers_through_three_kills(
    tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT imports transformers, which in this environment needs what SGLang needs on a CPU."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SHIMS), os.environ.get("PYTHONPATH", "")))))
    demo, said = run(tmp_path / "demo", capsys, ADAPTERS, OF_ADAPTERS, "--lora")
    assert said["scenarios"].keys() == {"digit", "successor"}
    for each in said["scenarios"].values():
        assert each["releases"] >= OF_ADAPTERS // 2 - 1 and each["reward_last"] > each["reward_first"]
    require_every_token_to_be_the_trainers(demo, replace(SHAPE, hidden=256, ffn=512, init_std=0.1))
