"""Two scenarios that train adapters over one frozen base. All processes are real; some are killed, one bit flipped, and
one artifact damaged.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture

from consumers.reef_supervisor.demo import Clients, Final
from consumers.reef_supervisor.deployment import Deployment
from consumers.reef_supervisor.harness import Harness
from reef_bus.artifacts import ArtifactStore
from reef_bus.cli import main
from reef_bus.core.ids import adapter_name
from reef_bus.core.serving import version
from reef_bus.events import EngineLeft, EngineStaged, InferenceRecorded, ReceiverFailed, Recorded, ReleaseCommitted
from reef_bus.manifest import describe
from reef_bus.peft_folder import read_peft_folder
from reef_bus.policy import PolicyConfig
from reef_bus.views import waiting
from tests.loop import until
from tests.watched import Watched, asked, ran, require_every_token_to_be_the_trainers

pytestmark = [pytest.mark.integration, pytest.mark.long]

RELEASES = 8
KILLS = ("engine-0@EngineStaged", "trainer@TargetPersisted", "publisher@EngineStaged", "engine-1@ReleaseCommitted")
SCENARIOS = {"digit", "successor"}
DAMAGED, OTHER = "digit", "successor"
FLIPPED = "engine-1@3"


class Damaged(Watched):
    """Once it has settled, an engine ends while one scenario's artifact is damaged; then that is put back."""

    boot = ""

    async def _finals(self, running: Deployment, clients: Clients) -> Final:
        if not self.boot:
            await self._damage(running, clients)
        return await super()._finals(running, clients)

    async def _damage(self, running: Deployment, clients: Clients) -> None:
        head = running.world.publications.adapters[DAMAGED]
        path = ArtifactStore(running.config.artifact_root()).path(head.weights.digest)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        running.kill("engine-1")
        await until(lambda: DAMAGED in running.world.membership.engines["engine-1"].failing, 60)
        engine = running.world.membership.engines["engine-1"]
        self.boot = engine.boot
        await until(lambda: version(running.world, engine, OTHER) is not None, 30)
        assert await answering(clients[OTHER]) == {"engine-0", "engine-1"}
        assert await answering(clients[DAMAGED]) == {"engine-0"}
        found = waiting(running.world, time.time_ns(), running.config.policy())
        assert found["on"] == "engine-1" and str(path) in found["next"]
        assert found["command"] == f"reef-bus rollback {DAMAGED} {head.parent} --why …"
        path.write_bytes(whole)
        await until(lambda: version(running.world, engine, DAMAGED) is not None, 30)


async def answering(client: Harness) -> set[str]:
    """Who answers, asked by many at once."""
    asked = (client.exchange("7", {"phase": "damaged"}, train=False) for _ in range(16))
    return {scored.answer.engine for scored in await asyncio.gather(*asked)}


def run(
    folder: Path, capsys: CaptureFixture[str], *words: str, kind: type[Watched] = Watched
) -> tuple[Watched, dict[str, Any]]:
    demo = kind(*asked(["--lora", "--releases", str(RELEASES), "--keep", str(folder), "--json", *words]))
    return demo, ran(demo, capsys)


def test_two_adapters_learn_over_one_base_through_kills_and_a_damaged_artifact(
    tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    demo, said = run(tmp_path / "demo", capsys, *(word for kill in KILLS for word in ("--kill", kill)), kind=Damaged)
    assert {f"{kill['component']}@{kill['event']}" for kill in said["kills"]} == set(KILLS)
    assert (said["audit_violations"], said["engines"], said["scenarios"].keys()) == (0, 2, SCENARIOS)
    assert all(each["releases"] >= RELEASES // 2 - 1 for each in said["scenarios"].values())
    require_every_token_to_be_the_trainers(demo, PolicyConfig(qk_norm=True, hidden=256, ffn=512, init_std=0.1))
    assert {scenario for scenario, _ in demo.sampled()} == SCENARIOS
    caught_up = [r for r in demo.history.log if isinstance(r.event, EngineStaged) and not r.event.publication]
    assert "engine-1" in {each.event.key for each in caught_up}
    require_a_folder_that_peft_opens(tmp_path / "demo", tmp_path / "adapter", demo)
    for scenario in SCENARIOS:
        require_only_what_a_boot_had_proven(demo.history.log, demo.history.records, scenario)
    require_one_word_on_what_was_damaged(demo)


def require_one_word_on_what_was_damaged(demo: Watched) -> None:
    """The boot that said so has lived on, and holds it in the end."""
    assert isinstance(demo, Damaged)
    log = [each for each in demo.history.log if each.boot == demo.boot]
    missed = [event for each in log if isinstance(event := each.event, ReceiverFailed)]
    assert [(event.publication, event.scenario, event.adapter) for event in missed] == [
        ("", DAMAGED, adapter_name(DAMAGED, missed[0].load_id))
    ]
    staged = [event.load_id for each in log if isinstance(event := each.event, EngineStaged)]
    assert missed[0].load_id in staged and not any(isinstance(each.event, EngineLeft) for each in log)


def require_a_folder_that_peft_opens(state: Path, into: Path, demo: Watched) -> None:
    """`reef-bus weights` of the kept deployment: the head's tensors, and what they stand beside."""
    assert main(["weights", "digit", "--into", str(into), "--state", str(state)]) == 0
    tensors, lora, base = read_peft_folder(into)
    head = max((each for each in demo.releases.values() if each.scenario == "digit"), key=lambda each: each.seq)
    assert (describe(tensors).digest, lora) == (head.manifest, demo.adapters["digit"].lora)
    (whole,) = (release for (scenario, _), release in demo.releases.items() if not scenario)
    assert base == f"reef-manifest:{whole.manifest}"


def require_only_what_a_boot_had_proven(log: list[Recorded], records: list[Recorded], scenario: str) -> None:
    """A replaced engine, too, has every scenario's adapter back, under its recorded name, before it answers with it."""
    staged: dict[tuple[str, str], int] = {}
    for recorded in log:
        if isinstance(event := recorded.event, EngineStaged) and event.scenario == scenario:
            assert event.adapter == adapter_name(scenario, event.load_id)
            staged.setdefault((recorded.boot, event.load_id), recorded.seq)
    committed = {
        recorded.event.load_id: recorded.seq for recorded in log if isinstance(recorded.event, ReleaseCommitted)
    }
    answers = [e for r in records if isinstance(e := r.event, InferenceRecorded) and e.scenario == scenario]
    of_releases = [answer for answer in answers if not answer.load_id.endswith(":0")]
    assert len({answer.boot for answer in of_releases}) >= 2
    for answer in of_releases:
        assert max(staged[answer.boot, answer.load_id], committed[answer.load_id]) <= answer.as_of


def test_an_adapter_with_a_flipped_bit_never_counts(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    demo, said = run(tmp_path / "demo", capsys, "--flip", FLIPPED)
    failures = [r for r in demo.history.log if isinstance(r.event, ReceiverFailed)]
    assert said["audit_violations"] == 0 and len(failures) == 1
    (failed,) = failures
    event = failed.event
    assert isinstance(event, ReceiverFailed)
    assert (event.engine, event.cause, event.adapter) == (
        "engine-1",
        "digest",
        adapter_name(event.scenario, event.load_id),
    )
    for recorded in demo.history.log:
        if isinstance(commit := recorded.event, ReleaseCommitted) and commit.load_id == event.load_id:
            assert failed.boot not in {each.boot for each in commit.evidence}
