"""The simulated hands of adapters: an engine that holds some beside its weights, and may go wrong with each.

Knows: the contract of engines that hold adapters, 32 bytes of each. Must not know: the log, or what is owed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef_bus.backends import Generation, Pieces, Prompt, Proof, Stop
from reef_bus.errors import TransferError
from reef_bus.events import Lora
from reef_bus.manifest import describe
from tests.simulation.faults import LOADS, Nemesis
from tests.simulation.hands import SIZE, Memory, Optimizer, Registry, completed, pieces

NO_LORA = b"an adapter that changes nothing"


class AdapterMemory(Memory):
    """It has room for so many adapters, and takes nothing under a name that is taken: who asks for that has lost count
    of them, as has who asks it to answer with one that it does not hold."""

    def __init__(self, chance: random.Random, nemesis: Nemesis, adapters: int) -> None:
        super().__init__(chance, nemesis, stages=False)
        self.adapters = adapters
        self.held: dict[str, bytes] = {}

    def load_adapter(self, name: str, tensors: Pieces, lora: Lora) -> None:
        assert name not in self.held, f"{name} is held already"
        content = b"".join(bytes(tensors[each].data) for each in ("a", "b"))
        fate = self.nemesis.befalls(LOADS)
        if fate == "no_load":
            raise TransferError("memory", "the engine refuses it")
        if fate == "another_load":
            content = self.chance.randbytes(2 * SIZE)
        if fate != "skip_load":
            self.held[name] = content
        assert len(self.held) <= (self.adapters or 0), f"{sorted(self.held)} are more than {self.adapters}"
        if fate == "late_load":
            raise TransferError("stalled", "no answer; it may be there")

    def adapter_proof(self, name: str, manifest: str, lora: Lora) -> Proof:
        if self.nemesis.befalls(("no_proof",)):
            raise TransferError("stalled", "the engine does not say")
        if name not in self.held:
            return Proof("it is not there", 0, "xxh3-128")
        found = describe(pieces(self.held[name])).digest
        return Proof("" if found == manifest else f"it is {found}", 2, "xxh3-128")

    def unload_adapter(self, name: str) -> str:
        """It may be gone though nobody hears of it."""
        leaks = self.nemesis.befalls(("leak",))
        if not leaks or self.chance.random() < 0.5:
            self.held.pop(name, None)
        return "no answer; it may be there" if leaks else ""

    def resident(self) -> frozenset[str]:
        return frozenset(self.held)

    def lose(self) -> None:
        """The engine was started again behind its agent's back."""
        self.held.clear()
        self.content[:] = self.chance.randbytes(2 * SIZE)

    def generate_until(self, prompts: Sequence[Prompt], stop: Stop, kept: Any = None) -> Generation:
        begun: list[bytes] = kept or [b""] * len(prompts)
        ends = [self.chance.randint(len(each), 2 * SIZE) if stop() else 2 * SIZE for each in begun]
        contents = [self.held[prompt.adapter] if prompt.adapter else self.content for prompt in prompts]
        made = [each + content[len(each) : end] for each, content, end in zip(begun, contents, ends, strict=True)]
        whole = all(len(each) == 2 * SIZE for each in made)
        return Generation([completed(each) for each in made], None if whole else made)


class AdapterOptimizer(Optimizer):
    """Trains adapters over the base model in the file: each is 32 bytes of its own."""

    def __init__(self, registry: Registry, nemesis: Nemesis, chance: random.Random | None, base: Path) -> None:
        super().__init__(registry, nemesis, chance)
        assert base.read_bytes()[-2 * SIZE :] in registry.contents.values(), "adapters of no base model"

    def initial(self) -> Any:
        content = NO_LORA.ljust(2 * SIZE)
        self.registry.enter(content, b"")
        return self._state(content)
