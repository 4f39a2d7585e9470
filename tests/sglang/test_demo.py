"""The whole loop over two real SGLang servers with SGLang's router before them, through three kills: a policy that
learns while it serves, and two adapters over a base that is frozen.

Knows: the demo as a person runs it, and every record that it leaves. Must not know: how any of it is done.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from msgspec.structs import replace
from pytest import CaptureFixture

from consumers.reef_engine.sglang.launch import SHIMS
from consumers.reef_supervisor.demo import Clients
from consumers.reef_supervisor.deployment import Deployment
from reef_bus.checkpoint import write_checkpoint
from reef_bus.events import EngineStaged
from reef_bus.policy import PolicyConfig, new_policy, pieces
from reef_bus.samples import TokenRow
from tests.e2e.cluster import free_ports
from tests.watched import CLOSE, Named, Watched, asked, furthest, ran, require_every_token_to_be_the_trainers

SHAPE = PolicyConfig(qk_norm=True)
WIDE = replace(SHAPE, hidden=256, ffn=512, init_std=0.1)
SAMPLING = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
PROMPT = (11, 7, 10)

RELEASES, OF_ADAPTERS = 8, 12
WHOLE = ("engine-0@EngineFenced", "trainer@SenderReady", "publisher@ReceiverVerified")
ADAPTERS = ("engine-0@EngineStaged", "trainer@TargetPersisted", "publisher@EngineStaged")


class Routed(Watched):
    """Rollout code asks the router, too, for every scenario and without end."""

    async def _train(self, running: Deployment, clients: Clients) -> None:
        self.routed: dict[Named, list[TokenRow]] = {}
        self.refused: list[str] = []
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            rolling = [group.create_task(self._roll(session, scenario)) for scenario in clients]
            try:
                await super()._train(running, clients)
            finally:
                for each in rolling:
                    each.cancel()

    async def _roll(self, session: aiohttp.ClientSession, scenario: str) -> None:
        url = f"http://127.0.0.1:{self.config.inference.router_port}/generate"
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "lora_path": scenario or None}
        up = False
        while True:
            try:
                async with session.post(url, json=body) as reply:
                    up = True
                    if reply.status != 200:
                        self.refused.append(f"{reply.status} {await reply.text()}")
                    else:
                        self._keep(scenario, await reply.json())
            except aiohttp.ClientError as error:
                self.refused += [repr(error)] if up else []
            await asyncio.sleep(0.1)

    def _keep(self, scenario: str, said: dict[str, Any]) -> None:
        meta, ids = said["meta_info"], tuple(said["output_ids"])
        [part] = meta["weight_versions"]
        assert part == {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        logprobs = tuple(logprob for logprob, _, _ in meta["output_token_logprobs"])
        row = TokenRow(prompt=PROMPT, answer=ids, logprobs=logprobs, load_ids=(part["version"],) * len(ids))
        self.routed.setdefault((scenario, part["version"]), []).append(row)


def run(
    folder: Path, capsys: CaptureFixture[str], kills: tuple[str, ...], releases: int, update: str, *words: str
) -> tuple[Routed, dict[str, Any]]:
    """Through the kills, and no process is left."""
    ordered = [word for kill in kills for word in ("--kill", kill)]
    all_words = ["--engine", "sglang", "--releases", str(releases), "--keep", str(folder), "--json", *ordered, *words]
    args, config = asked(all_words)
    [port] = free_ports(1)
    config = replace(config, inference=replace(config.inference, update=update, router_port=port))
    demo, others = Routed(args, config), psutil.Process().children(recursive=True)
    said = ran(demo, capsys)
    assert {f"{kill['component']}@{kill['event']}" for kill in said["kills"]} == set(kills)
    assert (said["audit_violations"], said["engines"], said["releases"] >= releases) == (0, 2, True)
    assert said["seconds"] < 600 and len(demo.greedy) > releases // 2
    left = demo.processes.difference(others)  # servers, and whatever they started
    assert len(left) > 6 and not psutil.wait_procs(left, timeout=10)[1]
    return demo, said


def test_a_policy_learns_on_two_real_servers_through_three_kills(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    demo, said = run(tmp_path / "demo", capsys, WHOLE, RELEASES, "broadcast")
    assert said["reward_last"] > said["reward_first"] + 0.1
    assert demo.sampled().keys() == demo.releases.keys()  # every release has answered
    require_every_token_to_be_the_trainers(demo, SHAPE)
    require_what_was_routed_to_be_so_too(demo, SHAPE)


@pytest.mark.parametrize("update", ["broadcast", "disk"])
def test_two_adapters_learn_over_one_base_on_two_real_servers_through_three_kills(
    tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """They are sent to the servers, or read by them from a folder; such a server starts with weights, of no version.
    PEFT imports transformers, which in this environment needs what SGLang needs on a CPU."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SHIMS), os.environ.get("PYTHONPATH", "")))))
    write_checkpoint(tmp_path / "demo" / "model", pieces(dict(new_policy(WIDE, 99).named_parameters())))
    demo, said = run(tmp_path / "demo", capsys, ADAPTERS, OF_ADAPTERS, update, "--lora")
    proofs = {each.event.algorithm for each in demo.history.log if isinstance(each.event, EngineStaged)}
    assert proofs == {"logprobs-within-0.0001" if update == "disk" else "sha256+logprobs-within-0.0001"}
    assert said["scenarios"].keys() == {"digit", "successor"}
    for each in said["scenarios"].values():
        assert each["releases"] >= OF_ADAPTERS // 2 - 1 and each["reward_last"] > each["reward_first"] + 0.1
    require_every_token_to_be_the_trainers(demo, WIDE)
    require_what_was_routed_to_be_so_too(demo, WIDE)


def require_what_was_routed_to_be_so_too(demo: Routed, shape: PolicyConfig) -> None:
    """Nobody was refused, and each answer is of a committed release of its scenario."""
    assert demo.refused == []
    policies = demo.policies(shape)
    assert demo.routed.keys() <= policies.keys() and len(demo.routed) > len(policies) // 2
    far = {named: furthest(policies[named], rows) for named, rows in demo.routed.items()}
    assert {named: distance for named, distance in far.items() if not distance < CLOSE} == {}
