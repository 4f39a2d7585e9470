"""The LoRA adapters that an engine in this process holds beside its policy.

Knows: adapters' tensors, the policy that they change. Must not know: prompts, scenarios, or who asks for which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reef_bus.backends import Piece, Pieces, Proof, places
from reef_bus.errors import Misfit, NotHeld, Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.lora import LowRank, adapted, beside, shapes
from reef_bus.manifest import Manifest, describe, differences
from reef_bus.policy import Policy, pieces

ALGORITHM = "xxh3-128"


class Held(NamedTuple):
    """One adapter: what was handed in, and the policy whose forward pass reads it, over the engine's own parameters."""

    given: Manifest
    lora: Lora
    policy: Policy


class Adapters:
    """By name. Whoever generates took a policy before it changes here, and keeps it to the end."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def load(self, policy: Policy, name: str, tensors: Pieces, lora: Lora) -> None:
        """Copy `tensors` into memory of our own. Raises Misfit for what is not exactly an adapter of `policy`, and for
        values that are not finite, TransferError for a name that is taken; nothing is held then."""
        if name in self._held:
            raise TransferError("refused", f"adapter {name} is held already: a name is loaded once")
        given = _checked(policy, tensors, lora)
        memory = {each: _tensor(piece) for each, piece in tensors.items()}
        self._held[name] = Held(given, lora, adapted(policy, memory, lora))

    def proof(self, policy: Policy, name: str, manifest: str, lora: Lora) -> Proof:
        """From the layers that answers under `name` pass through, not from what was loaded."""
        held = self._held.get(name)
        if held is None:
            return Proof(f"no adapter {name} is held", 0, ALGORITHM)
        found = describe(_views(held.policy))
        return Proof(_flaw(held, found, policy, manifest, lora), len(found.tensors), ALGORITHM)

    def unload(self, name: str) -> None:
        """Safe to repeat."""
        self._held.pop(name, None)

    def names(self) -> frozenset[str]:
        return frozenset(self._held)

    def policy(self, name: str) -> Policy:
        """The one that answers under this name. Raises NotHeld where there is none."""
        held = self._held.get(name)
        if held is None:
            raise NotHeld(f"no adapter {name} is loaded; found {', '.join(sorted(self._held)) or 'none'}")
        return held.policy

    def move(self, policy: Policy) -> None:
        """Have all of them stand beside this policy from now on, their own memory as it is."""
        for name, held in self._held.items():
            self._held[name] = held._replace(policy=adapted(policy, beside(held.policy), held.lora))


def _checked(policy: Policy, tensors: Pieces, lora: Lora) -> Manifest:
    try:
        expected = {name: ("F32", tuple(shape)) for name, shape in shapes(policy, lora).items()}
        given = describe(tensors, check_finite=True)
    except Rejected as error:
        raise Misfit("refused", str(error)) from error
    found = {entry.name: (entry.dtype, entry.shape) for entry in given.tensors}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            said = f"found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
            raise Misfit("mismatch", f"tensor {name!r}: {said}, by rank and targets of the adapter")
    return given


def _tensor(piece: Piece) -> Tensor:
    return torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(piece.shape)


def _views(policy: Policy) -> Pieces:
    return pieces(beside(policy), writable=True)


def _flaw(held: Held, found: Manifest, policy: Policy, manifest: str, lora: Lora) -> str:
    if found.digest != manifest:
        changed = differences(held.given, found)
        return changed[0] if changed else f"it is adapter {found.digest}, expected {manifest}"
    scale = lora.alpha / lora.rank
    for name, layer in held.policy.named_modules():
        if isinstance(layer, LowRank) and layer.scale != scale:
            return f"layer {name!r} adds {layer.scale} × B A, expected {scale}"
    return _foreign(held.policy, policy)


def _foreign(adapted: Policy, policy: Policy) -> str:
    """Whether all that is beside the adapter is the engine's own base model, by address."""
    base, own = (places(pieces(dict(each.named_parameters()), writable=True)) for each in (adapted, policy))
    moved = [name for name, place in base.items() if own.get(name.replace(".base.weight", ".weight")) != place]
    return f"parameter {moved[0]!r} is not the base model's" if moved else ""
