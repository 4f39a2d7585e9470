"""Adapters as folders: what we write, PEFT computes with as our engine does; what PEFT saved, we read alike.

Knows: PEFT and transformers, by which every claim about the layout is held. Must not know: engines' insides, trainers.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from reef_bus.backends import Pieces
from reef_bus.errors import Rejected, Unavailable
from reef_bus.events import Lora
from reef_bus.lora import adapted, shapes
from reef_bus.manifest import describe
from reef_bus.model_folder import write_model_folder
from reef_bus.peft_folder import CONFIG, TENSORS, read_peft_folder, write_peft_folder
from reef_bus.policy import Policy, PolicyConfig, new_policy, pieces

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASE = "reef-manifest:0123"
IDS = torch.tensor([[11, 3, 10, 3, 3, 5, 0, 15], [11, 7, 10, 1, 2, 3, 4, 5]])


def drawn(policy: Policy, lora: Lora, seed: int = 1) -> dict[str, Tensor]:
    """An adapter of which every tensor matters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes(policy, lora).items()}


def written(folder: Path, lora: Lora, tensors: Mapping[str, Tensor] | None = None) -> Path:
    tensors = tensors or drawn(new_policy(PolicyConfig(), 0), lora)
    write_peft_folder(folder, pieces(tensors), lora, BASE)
    return folder


def tensors_of(found: Pieces) -> dict[str, Tensor]:
    return {name: torch.frombuffer(bytearray(p.data), dtype=torch.float32).view(p.shape) for name, p in found.items()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(IDS)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT still asks for it
@pytest.mark.parametrize("lora", [Lora(8, 16, ALL), Lora(3, 5, ("down_proj", "self_attn.v_proj", "lm_head"))], ids=str)
@pytest.mark.parametrize("config", [PolicyConfig(), PolicyConfig(qk_norm=True)], ids=["llama", "qwen3"])
class TestAgainstPeft:
    def test_peft_computes_with_what_we_write_as_we_do(self, tmp_path: Path, config: PolicyConfig, lora: Lora) -> None:
        policy = new_policy(config, 0)
        write_model_folder(tmp_path / "model", config, pieces(dict(policy.named_parameters())))
        tensors = drawn(policy, lora)
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "model"), written(tmp_path / "adapter", lora, tensors)
        )
        ours = logits(adapted(policy, tensors, lora))
        torch.testing.assert_close(ours, logits(theirs), rtol=0, atol=1e-5)
        assert (ours - logits(policy)).abs().max() > 0.01

    def test_we_compute_with_what_peft_saved_as_it_does(self, tmp_path: Path, config: PolicyConfig, lora: Lora) -> None:
        policy = new_policy(config, 0)
        write_model_folder(tmp_path / "model", config, pieces(dict(policy.named_parameters())))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        wanted = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM"
        )
        wanted.init_lora_weights = False  # B is not zero, then
        theirs = get_peft_model(model, wanted).eval()
        theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        found, said, base = read_peft_folder(tmp_path / "adapter")
        assert (said.rank, said.alpha, set(said.targets)) == (lora.rank, lora.alpha, set(lora.targets))
        assert base == str(tmp_path / "model")
        ours = logits(adapted(policy, tensors_of(found), said))
        torch.testing.assert_close(ours, logits(theirs), rtol=0, atol=1e-5)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    lora = Lora(8, 32, ("v_proj", "q_proj"))
    tensors = drawn(new_policy(PolicyConfig(), 0), lora)
    found, said, base = read_peft_folder(written(tmp_path / "deep" / "a", lora, tensors))
    assert (said, base) == (lora, BASE)
    assert describe(found) == describe(pieces(tensors)) and all(piece.data.readonly for piece in found.values())
    assert sorted(os.listdir(tmp_path / "deep" / "a")) == [CONFIG, TENSORS]
    assert os.listdir(tmp_path / "deep") == ["a"]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", Lora(8, 16, ALL))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(Rejected, match="there already"):
        written(folder, Lora(2, 4, ALL))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(Unavailable, match="No space"):
        written(tmp_path / "a", Lora(8, 16, ALL))
    assert os.listdir(tmp_path) == []


def changed_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in said.items() if value != "absent"}))

    return change


def changed_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return write


def cut(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[:-4])


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), TENSORS),
    "cut": (cut, "is cut"),
    "an empty file": (lambda folder: (folder / TENSORS).write_bytes(b""), TENSORS),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
    "another method": (changed_config(peft_type="LOHA"), "LOHA"),
    "no rank": (changed_config(r="absent"), "`r`"),
    "a rank that is none": (changed_config(r=0), "rank 0"),
    "another rank": (changed_config(r=4), r"shape \[8, 128\].*rank 4"),
    "half an alpha": (changed_config(lora_alpha=0.5), "lora_alpha"),
    "all linear layers": (changed_config(target_modules="all-linear"), "target_modules"),
    "no targets": (changed_config(target_modules=[]), "targets"),
    "a target without tensors": (changed_config(target_modules=[*ALL, "lm_head"]), "'lm_head' has no tensors"),
    "tensors without a target": (changed_config(target_modules=ALL[:-1]), "down_proj.*no target"),
    "half a target's name": (changed_config(target_modules=[*ALL[:-1], "n_proj"]), "down_proj.*no target"),
    "DoRA": (changed_config(use_dora=True), "use_dora"),
    "another scale": (changed_config(use_rslora=True), "use_rslora"),
    "biases": (changed_config(bias="all"), "bias"),
    "other ranks": (changed_config(rank_pattern={"q_proj": 4}), "rank_pattern"),
    "some layers": (changed_config(layers_to_transform=[0]), "layers_to_transform"),
    "a base that was changed": (changed_config(init_lora_weights="pissa"), "pissa"),
    "a key of the future": (changed_config(use_xlora=True), "use_xlora"),
    "half a layer": (changed_tensors(lambda found: found.pop(A)), "mlp.up_proj' has only its B"),
    "an unknown tensor": (changed_tensors(lambda found: found.update({EMBEDDING: torch.ones(8, 16)})), EMBEDDING),
    "integers": (changed_tensors(lambda found: found.update({A: found[A].to(torch.int8)})), "up_proj.*I8"),
    "a turned tensor": (changed_tensors(lambda found: found.update({A: found[A].T.contiguous()})), r"\[64, 8\]"),
    "a flat tensor": (changed_tensors(lambda found: found.update({A: found[A].flatten()})), "up_proj"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_no_adapter_of_ours_is_refused_by_name(tmp_path: Path, what: str) -> None:
    folder = written(tmp_path / "a", Lora(8, 16, ALL))
    damage, named = DAMAGE[what]
    damage(folder)
    with pytest.raises(Rejected, match=named) as refused:
        read_peft_folder(folder)
    assert str(folder) in str(refused.value)


def test_what_is_no_adapter_is_not_written(tmp_path: Path) -> None:
    tensors = drawn(new_policy(PolicyConfig(), 0), Lora(8, 16, ALL))
    for lora in (Lora(4, 16, ALL), Lora(8, 16, ALL[:-1]), Lora(8, 16, (*ALL, "lm_head")), Lora(8, 16, (*ALL, ALL[0]))):
        with pytest.raises(Rejected, match="cannot write"):
            write_peft_folder(tmp_path / "a", pieces(tensors), lora, BASE)
    assert os.listdir(tmp_path) == []
