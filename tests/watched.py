"""A demo that is watched: what every recorded token must have been, by the trainer's own forward pass over what the
releases' artifacts hold.

Knows: the demo as a person runs it, and every record that it leaves. Must not know: how any of it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from pytest import CaptureFixture

from consumers.reef_supervisor.commands import _demo as arguments
from consumers.reef_supervisor.demo import Clients, Demo
from consumers.reef_supervisor.demo_config import check, configured
from consumers.reef_supervisor.deployment import Deployment
from consumers.reef_supervisor.harness import Harness
from reef_bus.artifacts import ArtifactStore
from reef_bus.audit import History, read_history
from reef_bus.backends import Piece
from reef_bus.config import Config
from reef_bus.core.publication import Release
from reef_bus.core.training import Adapter
from reef_bus.events import InferenceRecorded
from reef_bus.manifest import Manifest
from reef_bus.policy import Policy, PolicyConfig, fill
from reef_bus.samples import TokenRow, decode_rows
from reef_bus.stored import read
from reef_bus.tokens import encode, render

CLOSE = 1e-4
DIGIT = "7"

Named = tuple[str, str]
"""Scenario (of the whole model: empty) and load id."""

Tensors = Mapping[str, torch.Tensor]


class Watched(Demo):
    """Asks every scenario greedily once under each head, and keeps the whole history."""

    history: History
    base: Release
    releases: dict[Named, Release]
    adapters: dict[str, Adapter]
    greedy: dict[Named, str]
    processes: set[psutil.Process]

    async def _train(self, running: Deployment, clients: Clients) -> None:
        self.greedy = {}
        asking = [asyncio.create_task(self._ask(scenario, client)) for scenario, client in clients.items()]
        try:
            await super()._train(running, clients)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, scenario: str, client: Harness) -> None:
        while True:
            answer = await client.producer.ask(DIGIT, {"phase": "greedy"}, temperature=0)
            self.greedy[scenario, answer.load_id] = answer.text
            await client.producer.release(after=answer.load_id)

    async def _phases(self, running: Deployment, clients: Clients) -> dict[str, Any]:
        found = await super()._phases(running, clients)
        self.history = await read_history(running.journal, ArtifactStore(running.config.artifact_root()))
        published = running.world.publications
        self.adapters = dict(running.world.training.adapters)
        everything = (*published.releases.values(), *published.origins.values())
        self.releases = {(each.scenario, each.load_id): each for each in everything}
        self.processes = set(psutil.Process().children(recursive=True))
        return found

    def store(self) -> ArtifactStore:
        return ArtifactStore(self.config.artifact_root())

    def policies(self, shape: PolicyConfig) -> dict[Named, Policy]:
        """The trainer's model with what each release's artifact holds; an adapter is added to the base's weights."""
        origin = next(load_id for scenario, load_id in self.releases if not scenario)
        base = self._tensors(self.releases["", origin])
        return {
            (scenario, load_id): fill(Policy(shape), self._whole(scenario, self._tensors(release), base))
            for (scenario, load_id), release in self.releases.items()
        }

    def _whole(self, scenario: str, tensors: Tensors, base: Tensors) -> Tensors:
        if not scenario:
            return tensors
        lora, found = self.adapters[scenario].lora, dict(base)
        for name in (name for name in tensors if name.endswith(".lora_A.weight")):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            added = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            found[f"{layer}.weight"] = base[f"{layer}.weight"] + lora.alpha / lora.rank * added
        return found

    def _tensors(self, release: Release) -> Tensors:
        manifest = Manifest.decode(self.store().get(release.manifest))
        pieces = read(self.store(), release.weights.digest, manifest)
        return {name: _tensor(piece) for name, piece in pieces.items()}

    def sampled(self) -> dict[Named, list[TokenRow]]:
        """What was recorded of answers at temperature 1, by whom and what is said to have sampled it."""
        found: dict[Named, list[TokenRow]] = {}
        for recorded in self.history.records:
            if isinstance(event := recorded.event, InferenceRecorded) and event.temperature == 1.0:
                assert event.spans == ()
                scenario = event.scenario if event.scenario in self.adapters else ""
                row = decode_rows(self.store().get(event.blob.digest))[event.row]
                found.setdefault((scenario, event.load_id), []).append(row)
        return found


def asked(words: list[str]) -> tuple[argparse.Namespace, Config]:
    """As the command line reads it."""
    found = arguments().parse_args(words)
    check(found)
    return found, configured(found, None)


def ran(demo: Watched, capsys: CaptureFixture[str]) -> dict[str, Any]:
    """What it said at its end, which is good."""
    assert asyncio.run(demo.run()) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return said


def require_every_token_to_be_the_trainers(demo: Watched, shape: PolicyConfig) -> None:
    """Every recorded logprob is that of the named release's own forward pass; so is every greedy answer."""
    policies, rows = demo.policies(shape), demo.sampled()
    assert rows.keys() <= policies.keys()
    far = {named: furthest(policies[named], found) for named, found in rows.items()}
    assert {named: distance for named, distance in far.items() if not distance < CLOSE} == {}
    for named, text in demo.greedy.items():
        assert encode(text) == greedy(policies[named], render([{"role": "user", "content": DIGIT}]), 4)


def furthest(policy: Policy, rows: Sequence[TokenRow]) -> float:
    """Of the recorded logprobs, from those of the policy's own forward pass; all rows are of one length."""
    ids = torch.tensor([[*row.prompt, *row.answer] for row in rows])
    start = len(rows[0].prompt)
    with torch.no_grad():
        table = policy(ids).log_softmax(-1)[:, start - 1 : -1]
    expected = table.gather(2, ids[:, start:, None])[..., 0]
    return float(torch.tensor([row.logprobs for row in rows]).sub(expected).abs().max())


def greedy(policy: Policy, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def _tensor(piece: Piece) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(piece.shape)
