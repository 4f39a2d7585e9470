"""`reef-bus weights`: a committed release as files that other tools open.

Knows: the log's releases, the artifact store, two layouts of files. Must not know: engines, or what a model is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from reef_bus.artifacts import ArtifactStore
from reef_bus.backends import Pieces
from reef_bus.checkpoint import write_checkpoint
from reef_bus.cli_log import say, say_json
from reef_bus.cli_operator import read
from reef_bus.core.publication import Release
from reef_bus.core.world import World
from reef_bus.errors import ContractError, Rejected, TransferError
from reef_bus.events import Lora
from reef_bus.inspect import Judge, artifacts, fetching, head, opened
from reef_bus.journal import LOG
from reef_bus.manifest import Manifest
from reef_bus.peft_folder import write_peft_folder
from reef_bus.stored import read as stored

OK = 0


class Asked(NamedTuple):
    """A release; an adapter with what it is, and what it stands beside."""

    release: Release
    lora: Lora | None
    base: str


async def weights(args: argparse.Namespace) -> int:
    """Every tensor is hashed on its way. An adapter becomes a folder in PEFT's layout, a whole model a checkpoint."""
    async with opened(args) as (journal, config):
        judge = Judge(fetching(config))
        await read(journal, judge, await head(journal, LOG))
        asked, root = _asked(judge.world, args), artifacts(config)
    if root is None:
        raise Rejected("this machine does not reach the deployment's artifact store: name it by --state DIR or -c FILE")
    tensors = _tensors(ArtifactStore(root), asked.release)
    into = Path(args.into)
    if asked.lora:
        write_peft_folder(into, tensors, asked.lora, f"reef-manifest:{asked.base}")
    else:
        write_checkpoint(into, tensors)
    found = {"release": asked.release.load_id, "manifest": asked.release.manifest, "into": str(into)}
    if args.json:
        say_json({**found, "tensors": len(tensors)})
    else:
        say(f"{len(tensors)} tensors of {found['release']} are in {into}")
    return OK


def _asked(world: World, args: argparse.Namespace) -> Asked:
    published, adapters = world.publications, world.training.adapters
    known = [name for name in (world.training.scenario, *adapters) if name]
    if args.scenario not in known:
        raise Rejected(f"no scenario {args.scenario!r} on this log, which has: {', '.join(known) or 'none'}")
    adapter, base = adapters.get(args.scenario), published.head
    now = published.head_of(args.scenario)
    release = published.release(args.scenario if adapter else "", args.release) if args.release else now
    if release is None or base is None:
        raise Rejected(
            f"{args.release!r} is no release of {args.scenario}; its head is {now.load_id if now else 'none'}"
        )
    return Asked(release, adapter.lora if adapter else None, base.manifest)


def _tensors(store: ArtifactStore, release: Release) -> Pieces:
    try:
        return stored(store, release.weights.digest, Manifest.decode(store.get(release.manifest)))
    except (ContractError, TransferError) as error:
        raise Rejected(f"release {release.load_id} cannot be read: {error}") from error
