"""A real SGLang server over the tiny Qwen3, as tests drive it: versions put into its room, answers held against torch.

Knows: the backend, the policy. Must not know: agents, the log, or what a test is about.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from consumers.reef_engine.sglang.backend import SGLangEngine
from consumers.reef_engine.sglang.start import start
from reef_bus.backends import Completion, Pieces, Prompt
from reef_bus.config import Config, Inference, Publication
from reef_bus.core.effects import Me
from reef_bus.manifest import describe
from reef_bus.model_folder import write_model_folder
from reef_bus.policy import Policy, PolicyConfig, new_policy, pieces
from reef_bus.sections import Adapters

SHAPE = PolicyConfig(qk_norm=True, max_len=1024, init_std=0.3)
"""Long answers, so that a pause finds one halfway; far from uniform, so that versions differ in every token."""
CLOSE = 1e-4
NO_ADAPTERS = Adapters()


class Subject:
    """One server. `died` says what it said when it was of no use any more."""

    def __init__(self) -> None:
        self.died: list[str] = []
        self.engine: SGLangEngine

    def policy(self, seed: int) -> Policy:
        """Versions differ in every tensor, norms included."""
        policy, generator = new_policy(SHAPE, seed), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        return policy

    def version(self, seed: int) -> Pieces:
        return pieces(dict(self.policy(seed).named_parameters()))

    async def receive(self, version: Pieces) -> str:
        """Into the room, as a transport would; returns the manifest's digest."""
        manifest = describe(version)
        room = await asyncio.to_thread(self.engine.room, manifest.layouts())
        for name, piece in room.items():
            piece.data[:] = version[name].data
        assert describe(room) == manifest
        return manifest.digest

    async def load(self, seed: int, load_id: str) -> str:
        """Received, expected, taken and proven; returns the manifest's digest."""
        manifest = await self.receive(self.version(seed))
        await asyncio.to_thread(self.engine.expect, manifest)
        await asyncio.to_thread(self.engine.take, load_id)
        assert await self.flaw(manifest, load_id) == ""
        return manifest

    async def flaw(self, manifest: str, load_id: str) -> str:
        return (await asyncio.to_thread(self.engine.proof, manifest, load_id)).flaw

    def with_(self, **inference: object) -> contextlib.AbstractContextManager[None]:
        return _replaced(self.engine, inference)


def used(subject: Subject) -> int:
    """Tokens that the server holds for what it has in hand."""
    return int(subject.engine.client.get("v1/loads")["loads"][0]["num_used_tokens"])


async def under_way(subject: Subject, asked: asyncio.Future[Any], prompt: Prompt) -> None:
    """Until some tokens of that answer are sampled; nothing else is in hand."""
    while not asked.done() and used(subject) < len(prompt.ids) + 16:  # noqa: ASYNC110 - another process says it
        await asyncio.sleep(0.01)
    assert not asked.done(), "the machine is too fast for this test: ask for more tokens"


def begun(subject: Subject, prompt_ids: Sequence[int]) -> Callable[[], Awaitable[None]]:
    """As the contract's: returns when some tokens are sampled of the one prompt in hand, or it is over already."""

    async def returns() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while used(subject) < len(prompt_ids) + 16:  # noqa: ASYNC110 - another process says it
                    await asyncio.sleep(0.01)

    return returns


@contextlib.contextmanager
def _replaced(engine: SGLangEngine, inference: dict[str, object]):  # type: ignore[no-untyped-def]
    before = engine.inference
    engine.inference = msgspec.structs.replace(before, **inference)
    try:
        yield
    finally:
        engine.inference = before


@contextlib.contextmanager
def replaced(subject: Subject, method: str, call: Callable[..., Any]) -> Iterator[None]:
    """The client's `method`, as somebody between us and the server would have it."""
    client = subject.engine.client
    honest = getattr(client, method)
    setattr(client, method, lambda *args, **named: call(honest, *args, **named))
    try:
        yield
    finally:
        delattr(client, method)


def config(folder: Path, adapters: Adapters = NO_ADAPTERS, **inference: object) -> Config:
    """A deployment of which only the engine is started, from a folder with weights of no version, by which every token
    is an end. Paused in place, it keeps what it has computed."""
    model = folder / "model"
    write_model_folder(model, SHAPE, pieces(dict(new_policy(SHAPE, 0).named_parameters())))
    said = msgspec.json.decode((model / "config.json").read_bytes())
    (model / "config.json").write_bytes(msgspec.json.encode({**said, "eos_token_id": list(range(SHAPE.vocab))}))
    chosen = {"max_batch": 16, "dtype": "float32", "prefix_cache": False, **inference}
    return Config(
        state_dir=str(folder),
        inference=Inference(backend="sglang", model_path=str(model), **chosen),  # type: ignore[arg-type]
        publication=Publication(pause="in_place"),
        adapters=adapters,
    )


@contextlib.asynccontextmanager
async def running(folder: Path, adapters: Adapters = NO_ADAPTERS, **inference: object) -> AsyncIterator[Subject]:
    async with serving(config(folder, adapters, **inference)) as found:
        yield found


@contextlib.asynccontextmanager
async def serving(chosen: Config) -> AsyncIterator[Subject]:
    found = Subject()
    async with contextlib.AsyncExitStack() as stack:
        found.engine = await start(chosen, Me("e0", "boot-1"), found.died.append, stack)
        yield found


def logprobs(policy: Policy, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Of the completion's tokens at the prompt's temperature, by the trainer's own forward pass."""
    return _chosen(_table(policy, prompt, completion, prompt.temperature), completion)


def likeliest(policy: Policy, prompt: Prompt, completion: Completion, within: float) -> bool:
    """Whether the policy finds none of the completion's tokens less likely than another by more than `within`: what is
    greedy where a server rounds."""
    table = _table(policy, prompt, completion)
    return bool(table.max(-1).values.sub(_chosen(table, completion)).max() <= within)


def _table(policy: Policy, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*prompt.ids, *completion.ids]])
    with torch.no_grad():
        return policy(ids).div(temperature).log_softmax(-1)[0, len(prompt.ids) - 1 : -1]


def _chosen(table: torch.Tensor, completion: Completion) -> torch.Tensor:
    return table.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


def greedy(policy: Policy, prompt: Prompt) -> tuple[int, ...]:
    ids = list(prompt.ids)
    for _ in range(prompt.max_tokens):
        with torch.no_grad():
            ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(prompt.ids) :])


@contextlib.asynccontextmanager
async def borrowing(
    subject: Subject, folder: Path, adapters: Adapters = NO_ADAPTERS, **inference: object
) -> AsyncIterator[Subject]:
    """Another agent's engine, over the server that is there."""
    found, url = Subject(), subject.engine.client.url
    async with contextlib.AsyncExitStack() as stack:
        chosen = config(folder, adapters, urls={"e0": url}, **inference)
        found.engine = await start(chosen, Me("e0", "boot-2"), found.died.append, stack)
        yield found
    assert found.died == []
