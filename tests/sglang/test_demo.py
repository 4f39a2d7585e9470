"""The whole loop over two real SGLang servers: a policy that learns while it serves, through three kills.

Knows: the demo as a person runs it, and every record that it leaves. Must not know: how any of it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from pytest import CaptureFixture

from consumers.reef_supervisor.commands import _demo as arguments
from consumers.reef_supervisor.demo import Demo
from consumers.reef_supervisor.demo_config import check, configured
from consumers.reef_supervisor.deployment import Deployment
from consumers.reef_supervisor.harness import Harness
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, read_history
from reef_bus.backends import Piece, Prompt
from reef_bus.config import Config
from reef_bus.core.publication import Release
from reef_bus.events import InferenceRecorded
from reef_bus.manifest import Manifest
from reef_bus.policy import Policy, PolicyConfig, fill
from reef_bus.samples import TokenRow, decode_rows
from reef_bus.stored import read
from reef_bus.tokens import encode, render
from tests.sglang.subject import CLOSE, greedy

SHAPE = PolicyConfig(qk_norm=True)

RELEASES = 8
KILLS = ("engine-0@EngineFenced", "trainer@SenderReady", "publisher@ReceiverVerified")
DIGIT = "7"


class Watched(Demo):
    """Asks greedily once under each head, and keeps the whole history."""

    history: History
    releases: dict[str, Release]
    greedy: dict[str, str]
    processes: set[psutil.Process]

    async def _train(self, running: Deployment, client: Harness) -> None:
        asking = asyncio.create_task(self._ask(running, client))
        try:
            await super()._train(running, client)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, running: Deployment, client: Harness) -> None:
        self.greedy = {}
        while True:
            answer = await client.producer.ask(DIGIT, {"phase": "greedy"}, temperature=0)
            self.greedy[answer.load_id] = answer.text
            await client.producer.release(after=answer.load_id)

    async def _phases(self, running: Deployment, client: Harness) -> dict[str, Any]:
        found = await super()._phases(running, client)
        self.history = await read_history(running.journal, ArtifactStore(running.config.artifact_root()))
        self.releases = dict(running.world.publications.releases)
        self.processes = set(psutil.Process().children(recursive=True))
        return found


def policies(demo: Watched, store: ArtifactStore) -> dict[str, Policy]:
    """By load id: the trainer's model, with what the artifact holds."""
    found = {}
    for load_id, release in demo.releases.items():
        manifest = Manifest.decode(store.get(release.manifest))
        tensors = read(store, release.weights.digest, manifest)
        found[load_id] = fill(Policy(SHAPE), {name: _tensor(piece) for name, piece in tensors.items()})
    return found


def _tensor(piece: Piece) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(piece.shape)


def furthest(policy: Policy, rows: Sequence[TokenRow]) -> float:
    """Of the recorded logprobs, from those of the policy's own forward pass; all rows are of one length."""
    ids = torch.tensor([[*row.prompt, *row.answer] for row in rows])
    start = len(rows[0].prompt)
    with torch.no_grad():
        table = policy(ids).log_softmax(-1)[:, start - 1 : -1]
    expected = table.gather(2, ids[:, start:, None])[..., 0]
    return float(torch.tensor([row.logprobs for row in rows]).sub(expected).abs().max())


def sampled(demo: Watched, store: ArtifactStore) -> dict[str, list[TokenRow]]:
    """What was recorded of answers at temperature 1, by the load id that is said to have sampled it."""
    found: dict[str, list[TokenRow]] = {}
    for recorded in demo.history.records:
        if isinstance(event := recorded.event, InferenceRecorded) and event.temperature == 1.0:
            assert event.spans == ()
            found.setdefault(event.load_id, []).append(decode_rows(store.get(event.blob.digest))[event.row])
    return found


def test_a_policy_learns_on_two_real_servers_through_three_kills(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    kills = [word for kill in KILLS for word in ("--kill", kill)]
    words = ["--engine", "sglang", "--releases", str(RELEASES), "--keep", str(tmp_path / "demo"), "--json", *kills]
    demo, others = Watched(*asked(words)), psutil.Process().children(recursive=True)
    assert asyncio.run(demo.run()) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {f"{kill['component']}@{kill['event']}" for kill in said["kills"]} == set(KILLS)
    assert (said["audit_violations"], said["engines"], said["releases"] >= RELEASES) == (0, 2, True)
    assert said["reward_last"] > said["reward_first"] + 0.1 and said["seconds"] < 600

    store = ArtifactStore(tmp_path / "demo" / "artifacts")
    trained = policies(demo, store)
    rows = sampled(demo, store)
    assert rows.keys() == trained.keys()  # every release has answered
    assert {load_id: furthest(trained[load_id], found) < CLOSE for load_id, found in rows.items()} == dict.fromkeys(
        rows, True
    )
    assert len(demo.greedy) > RELEASES // 2
    prompt = Prompt(ids=render([{"role": "user", "content": DIGIT}]), max_tokens=4, temperature=0.0)
    for load_id, text in demo.greedy.items():
        assert encode(text) == greedy(trained[load_id], prompt)
    left = demo.processes.difference(others)  # servers, and whatever they started
    assert len(left) > 6 and not psutil.wait_procs(left, timeout=10)[1]


def asked(words: list[str]) -> tuple[argparse.Namespace, Config]:
    """As the command line reads it."""
    found = arguments().parse_args(words)
    check(found)
    return found, configured(found, None)
