"""Our flags against the parser of the SGLang that is installed: each is one of its own, and none can be given twice.

Knows: what a server is started with, the parser. Must not know: a running server.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from consumers.reef_engine.sglang.launch import adapter_flags, model_flags, server_flags
from reef_bus.config import OPTIONS, Inference, build
from reef_bus.model_folder import write_model_folder
from reef_bus.sections import Adapters
from tests.sglang.subject import SHAPE

CHOSEN = "chosen for a CPU; a user's own comes later, and counts"
MAY_SET = {
    "attention-backend": CHOSEN,
    "sampling-backend": CHOSEN,
    "grammar-backend": CHOSEN,
    "disable-cuda-graph": CHOSEN,
    "mem-fraction-static": CHOSEN,
    "max-total-tokens": CHOSEN,
    "lora-backend": "chosen for a CPU, where no other one works; on a GPU the user's counts",
    "sleep-on-idle": "given on a CPU; on a GPU it is as well for the user to choose",
}
"""Flags of ours for which no key stands, and why they may be options."""


@pytest.fixture(scope="module")
def spellings(imported: Callable[[str], ModuleType]) -> dict[str, set[str]]:
    """Every name of an option, with all names, itself included, that set the same."""
    parser = argparse.ArgumentParser()
    imported("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    named = [({each.removeprefix("--") for each in action.option_strings}, action.dest) for action in parser._actions]
    return {
        name: set().union(*(names for names, other in named if other == dest))
        for every, dest in named
        for name in every
    }


def given() -> set[str]:
    """Whatever a server is ever started with."""
    adapters, found = Adapters(scenarios=("red",)), set[str]()
    for device, cache, asked in itertools.product(("cpu", "cuda"), (False, True), (False, True)):
        inference = Inference(prefix_cache=cache)
        flags = model_flags(inference, Path("model"), device)
        flags += server_flags(inference, 1, "key", device, spans=asked, saver=asked, weights=asked)
        found |= {word for word in [*flags, *adapter_flags(adapters, device)] if word.startswith("--")}
    return {word.removeprefix("--") for word in found}


@pytest.mark.parametrize("name", sorted(given()))
def test_a_flag_of_ours_is_no_option_under_any_of_its_names_but_for_those_that_a_user_may_set(
    spellings: dict[str, set[str]], name: str
) -> None:
    assert name in spellings, "this SGLang has no such option"
    assert not spellings[name] - OPTIONS.keys() - MAY_SET.keys()


@pytest.mark.parametrize("name", sorted(MAY_SET))
def test_what_a_user_may_set_is_given_by_us_and_taken(tmp_path: Path, name: str) -> None:
    assert name in given()
    write_model_folder(tmp_path, SHAPE)
    chosen = {"backend": "sglang", "model-path": str(tmp_path), "options": {name: True}}
    assert build("test", {"inference": chosen}).inference.options == {name: True}
