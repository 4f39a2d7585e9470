"""LoRA in torch: the trainer over one frozen base, the engine's adapters, and what they compute, by hand.

Knows: the two backends, PEFT's formulas written out. Must not know: the log, transports, or consumers.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from consumers.reef_engine.torch_backend import TorchEngine
from consumers.reef_trainer.lora_backend import LoraTrainer
from consumers.reef_trainer.torch_backend import Hyper, State
from reef_bus.backends import Completion, Pieces, Prompt, never
from reef_bus.errors import ContractError, Misfit, Rejected
from reef_bus.events import Lora
from reef_bus.lora import adapted, shapes, targeted, zero_adapter
from reef_bus.manifest import describe
from reef_bus.policy import Policy, PolicyConfig, new_policy, pieces
from tests.unit.test_torch_backends import TIMELESS, ask, batch, digest, judge, push, saved, whole_digest

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, LORA = PolicyConfig(qk_norm=True, init_std=0.1), Lora(8, 32, ALL)
HYPER = Hyper(lr=5e-3, minibatches=4)
PROMPT = Prompt(ids=(11, 3, 10), max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file({name: each.detach() for name, each in new_policy(CONFIG, 0).named_parameters()}, path)
    return path


@pytest.fixture(scope="module")
def trainer(base: Path) -> LoraTrainer:
    return LoraTrainer(CONFIG, base, LORA, HYPER)


def trained(trainer: LoraTrainer, seed: int = 0, start: State | None = None) -> State:
    return trainer.train(start or trainer.initial(), batch(), seed)[0]


def engine_over(base: Path, config: PolicyConfig = CONFIG) -> TorchEngine:
    engine = TorchEngine(config, seed=0)
    engine.start()
    push(pieces(load_file(base)), {name: engine.live()[name] for name in load_file(base)})
    return engine


def said(engine: TorchEngine, adapter: str = "") -> tuple[int, ...]:
    prompt = Prompt(ids=PROMPT.ids, max_tokens=16, temperature=0.0, adapter=adapter)
    return engine.generate([prompt])[0].ids


class TestTrainer:
    def test_what_it_begins_with_changes_nothing(self, trainer: LoraTrainer, base: Path) -> None:
        engine = engine_over(base)
        engine.load_adapter("a", trainer.weights(trainer.initial()), LORA)
        assert said(engine, "a") == said(engine)
        assert all(not tensor.any() for name, tensor in trainer.initial().weights.items() if "lora_B" in name)
        assert all(tensor.all() for name, tensor in trainer.initial().weights.items() if "lora_A" in name)

    def test_what_it_begins_with_is_drawn_as_peft_draws(self, trainer: LoraTrainer) -> None:
        """Uniform between ±1/√inputs: by Hu et al.'s code kaiming_uniform_ with a = √5."""
        for name, tensor in trainer.initial().weights.items():
            if "lora_A" in name:
                bound = 1 / math.sqrt(tensor.shape[1])
                assert 0.95 * bound < tensor.abs().max() <= bound
                assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)

    def test_a_seed_gives_the_same_bytes_to_everybody(self, trainer: LoraTrainer, base: Path) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        other = LoraTrainer(CONFIG, base, LORA, HYPER)
        assert torch.equal(torch.random.get_rng_state(), before), "the global generator was drawn from"
        assert whole_digest(other, other.initial()) == whole_digest(trainer, trainer.initial())
        assert whole_digest(other, trained(other)) == whole_digest(trainer, trained(trainer))
        elsewhere = LoraTrainer(CONFIG, base, LORA, Hyper(seed=1))
        assert digest(elsewhere.weights(elsewhere.initial())) != digest(trainer.weights(trainer.initial()))

    def test_what_it_begins_with_is_these_bytes_on_every_machine(self) -> None:
        made = zero_adapter(shapes(new_policy(PolicyConfig(), 0), Lora(2, 4, ("v_proj",))), 0)
        first = made["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"][0, :2]
        drawn = torch.randint(0, 2**24, (2, 64), generator=torch.Generator().manual_seed(0))[0, :2].tolist()
        assert first.tolist() == [float(torch.tensor((n / 2**23 - 1) / 8, dtype=torch.float32)) for n in drawn]

    def test_the_base_is_neither_trained_nor_written(self, trainer: LoraTrainer, base: Path) -> None:
        file, memory = hashlib.sha256(base.read_bytes()).hexdigest(), {}
        for name, parameter in trainer.filled(trainer.initial().weights)[0].named_parameters():
            memory[name] = parameter.clone()
        trained(trainer)
        policy, parameters = trainer.filled(trainer.initial().weights)
        assert hashlib.sha256(base.read_bytes()).hexdigest() == file
        assert all(torch.equal(each, memory[name]) for name, each in policy.named_parameters())
        frozen = [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]
        assert len(frozen) == 25 and len(parameters) == 28
        assert all(parameter.grad is None for parameter in policy.parameters())

    def test_training_leaves_its_input_alone_and_repeats_to_the_bit(self, trainer: LoraTrainer) -> None:
        state = trained(trainer)
        before = whole_digest(trainer, state)
        first, metrics = trainer.train(state, batch(), 1)
        again, repeated = trainer.train(state, batch(), 1)
        assert whole_digest(trainer, state) == before != whole_digest(trainer, first)
        assert whole_digest(trainer, first) == whole_digest(trainer, again)
        assert [metrics[name] for name in TIMELESS] == [repeated[name] for name in TIMELESS]

    def test_scenarios_that_take_turns_do_not_touch_each_other(self, trainer: LoraTrainer, base: Path) -> None:
        one, other = trained(trainer, 1), trained(trainer, 2)
        for seed in (3, 4):
            one, other = trained(trainer, seed, one), trained(trainer, seed, other)
        alone = LoraTrainer(CONFIG, base, LORA, HYPER)
        state = trained(alone, 1)
        for seed in (3, 4):
            state = trained(alone, seed, state)
        assert whole_digest(alone, state) == whole_digest(trainer, one) != whole_digest(trainer, other)

    def test_saving_and_loading_goes_on_to_the_bit(self, trainer: LoraTrainer, base: Path, tmp_path: Path) -> None:
        state = trained(trainer)
        weights, optimizer = saved(trainer, state, tmp_path)
        other = LoraTrainer(CONFIG, base, LORA, HYPER)
        resumed = other.load(weights, optimizer)
        assert whole_digest(other, resumed) == whole_digest(trainer, state)
        assert whole_digest(other, trained(other, 1, resumed)) == whole_digest(trainer, trained(trainer, 1, state))
        fresh = other.load(weights, None)
        assert digest(other.weights(fresh)) == digest(trainer.weights(state))
        assert other.optimizer(fresh) == trainer.optimizer(trainer.initial())

    def test_weights_are_read_only_and_bear_pefts_names(self, trainer: LoraTrainer) -> None:
        found = trainer.weights(trainer.initial())
        assert all(piece.data.readonly for piece in found.values())
        assert len(found) == 2 * 7 * 2 and sum(piece.data.nbytes for piece in found.values()) == 65_536
        layer = "base_model.model.model.layers.1.mlp.down_proj"
        assert found[f"{layer}.lora_A.weight"].shape == (8, 128) and found[f"{layer}.lora_B.weight"].shape == (64, 8)

    def test_a_damaged_file_is_a_contract_error_that_names_it(self, trainer: LoraTrainer, tmp_path: Path) -> None:
        weights, _ = saved(trainer, trainer.initial(), tmp_path)
        good, name = load(weights.read_bytes()), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        damaged: dict[str, tuple[bytes, str]] = {
            "cut": (weights.read_bytes()[:-1], "cut"),
            "missing": (save({each: t for each, t in good.items() if each != name}), "q_proj.lora_A"),
            "extra": (save({**good, "lm_head.weight": torch.zeros(1)}), "lm_head"),
            "rank": (save({**good, name: torch.ones(4, 64)}), "q_proj.lora_A"),
            "type": (save({each: t.bfloat16() for each, t in good.items()}), "bfloat16"),
            "nan": (save({**good, name: torch.full((8, 64), math.nan)}), "q_proj.lora_A.* not finite"),
        }
        for what, (content, named) in damaged.items():
            (tmp_path / what).write_bytes(content)
            with pytest.raises(ContractError, match=named):
                trainer.load(tmp_path / what, None)
        with pytest.raises(ContractError, match="weights"):
            trainer.load(weights, weights)

    def test_a_base_that_is_none_is_refused(self, base: Path, tmp_path: Path) -> None:
        good = load_file(base)
        (tmp_path / "cut").write_bytes(base.read_bytes()[:-1])
        save_file({name: each for name, each in good.items() if "q_norm" not in name}, tmp_path / "another")
        save_file({**good, "model.norm.weight": torch.full((64,), math.nan)}, tmp_path / "nan")
        for name in ("cut", "another", "nan", "absent"):
            with pytest.raises(ContractError, match=name):
                LoraTrainer(CONFIG, tmp_path / name, LORA)

    @pytest.mark.parametrize(
        ("lora", "named"),
        [
            (Lora(8, 16, ("qkv_proj",)), "'qkv_proj' names no linear layer.*q_proj"),
            (Lora(8, 16, ("q_proj", "embed_tokens")), "'embed_tokens'"),
            (Lora(8, 16, ("proj",)), "'proj'"),
            (Lora(8, 16, ()), "without targets"),
            (Lora(0, 16, ALL), "rank 0"),
            (Lora(8, 0, ALL), "alpha 0"),
        ],
    )
    def test_an_adapter_that_the_model_cannot_have_is_refused(self, base: Path, lora: Lora, named: str) -> None:
        with pytest.raises(Rejected, match=named):
            LoraTrainer(CONFIG, base, lora)

    def test_targets_mean_what_they_mean_to_peft(self, base: Path) -> None:
        """The trainer would refuse if PEFT had put its layers anywhere else."""
        for targets in (("lm_head",), ("self_attn.v_proj", "mlp.up_proj"), ("model.layers.1.mlp.gate_proj", "k_proj")):
            found = LoraTrainer(CONFIG, base, Lora(2, 4, targets)).initial().weights
            layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found}
            assert layers == set(targeted(new_policy(CONFIG, 0), Lora(2, 4, targets)))
            assert all(any(layer.endswith(target) for target in targets) for layer in layers)


class TestAdapted:
    def test_the_formula_by_hand(self) -> None:
        policy, lora = new_policy(PolicyConfig(), 0), Lora(2, 6, ("lm_head",))
        a, b = torch.arange(128.0).view(2, 64) / 100, torch.arange(32.0).view(16, 2) / 100
        names = "base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"
        ids = torch.tensor([PROMPT.ids])
        with torch.no_grad():
            found = adapted(policy, dict(zip(names, (a, b), strict=True)), lora)(ids)
            policy.lm_head.weight += 3 * b @ a
            torch.testing.assert_close(found, policy(ids), rtol=1e-5, atol=1e-5)

    def test_nothing_of_the_base_is_copied_or_changed(self) -> None:
        policy = new_policy(PolicyConfig(), 0)
        before = digest(pieces(dict(policy.named_parameters())))
        found = adapted(policy, zero_adapter(shapes(policy, LORA), 0), LORA)
        own = {parameter.data_ptr() for parameter in policy.parameters()}
        assert {parameter.data_ptr() for parameter in found.parameters()} == own
        assert digest(pieces(dict(policy.named_parameters()))) == before


class TestEngine:
    def test_it_computes_to_the_bit_as_the_trainer(self, trainer: LoraTrainer, base: Path) -> None:
        """So that no logprob of a sample differs from the trainer's own."""
        state, ids = trained(trainer), torch.tensor([[11, 3, 10, 3, 5, 3, 3]])
        policy = new_policy(CONFIG, 0)
        with torch.no_grad():
            ours = adapted(policy, state.weights, LORA)(ids)
            assert torch.equal(ours, trainer.filled(state.weights)[0](ids))
            assert not torch.equal(ours, policy(ids))

    def test_the_proof_names_the_tensor_that_changed_under_it(self, trainer: LoraTrainer, base: Path) -> None:
        engine, tensors = engine_over(base), trainer.weights(trained(trainer))
        engine.load_adapter("a", tensors, LORA)
        asked = describe(tensors).digest
        proof = engine.adapter_proof("a", asked, LORA)
        assert (proof.flaw, proof.tensors, proof.algorithm) == ("", 28, "xxh3-128")
        layer = engine._adapters.policy("a").get_submodule("model.layers.1.mlp.up_proj")
        layer.b[3, 2] += 1e-7  # type: ignore[union-attr, index]
        assert "layers.1.mlp.up_proj.lora_B" in engine.adapter_proof("a", asked, LORA).flaw
        layer.b[3, 2] -= 1e-7  # type: ignore[union-attr, index]

    def test_the_proof_finds_another_scale_and_another_base(self, trainer: LoraTrainer, base: Path) -> None:
        engine, tensors = engine_over(base), trainer.weights(trained(trainer))
        engine.load_adapter("a", tensors, LORA)
        asked, policy = describe(tensors).digest, engine._adapters.policy("a")
        policy.get_submodule("model.layers.0.mlp.up_proj").scale = 1.0
        assert "layers.0.mlp.up_proj" in engine.adapter_proof("a", asked, LORA).flaw
        policy.get_submodule("model.layers.0.mlp.up_proj").scale = 4.0
        assert engine.adapter_proof("a", asked, LORA).flaw == ""
        policy.model.norm.weight = torch.nn.Parameter(policy.model.norm.weight.clone())
        assert "model.norm.weight" in engine.adapter_proof("a", asked, LORA).flaw

    def test_what_is_loaded_is_a_copy(self, trainer: LoraTrainer, base: Path) -> None:
        engine, memory = engine_over(base), {n: bytearray(p.data) for n, p in trainer.weights(trained(trainer)).items()}
        like = trainer.weights(trainer.initial())
        tensors = {name: piece._replace(data=memoryview(memory[name])) for name, piece in like.items()}
        asked = describe(tensors).digest
        engine.load_adapter("a", tensors, LORA)
        for each in memory.values():
            each[:] = bytes(len(each))
        assert engine.adapter_proof("a", asked, LORA).flaw == ""

    def test_an_unloaded_adapter_gives_its_memory_back(self, trainer: LoraTrainer, base: Path) -> None:
        engine = engine_over(base)
        engine.load_adapter("a", trainer.weights(trained(trainer)), LORA)
        policy = weakref.ref(engine._adapters.policy("a"))
        gc.disable()
        try:
            assert engine.unload_adapter("a") == ""
            assert policy() is None
        finally:
            gc.enable()

    def test_adapters_stand_beside_whatever_is_swapped_in(self, trainer: LoraTrainer, base: Path) -> None:
        engine, other, tensors = engine_over(base), new_policy(CONFIG, 1), trainer.weights(trained(trainer))
        engine.load_adapter("a", tensors, LORA)
        before = said(engine, "a")
        push(pieces(dict(other.named_parameters())), engine.stage())
        assert said(engine, "a") == before
        engine.swap()
        assert engine.adapter_proof("a", describe(tensors).digest, LORA).flaw == ""
        assert said(engine, "a") == greedy(adapted(other, as_tensors(tensors), LORA)) != before
        engine.swap()
        assert said(engine, "a") == before

    def test_a_batch_that_was_stopped_goes_on_with_its_adapters(self, trainer: LoraTrainer, base: Path) -> None:
        engine = engine_over(base)
        engine.load_adapter("a", trainer.weights(trained(trainer)), LORA)
        prompts = [PROMPT, Prompt(ids=PROMPT.ids, max_tokens=16, temperature=0.0, adapter="a")]
        whole = [answer.ids for answer in engine.generate(prompts)]
        first = engine.generate_until(prompts, after(5))
        engine.load_adapter("b", trainer.weights(trainer.initial()), LORA)
        second = engine.generate_until(prompts, never, first.kept)
        assert [answer.ids for answer in second.completions] == whole

    def test_an_adapter_with_values_that_are_not_finite_is_not_held(self, trainer: LoraTrainer, base: Path) -> None:
        engine, state = engine_over(base), trained(trainer)
        name = next(iter(state.weights))
        bad = pieces({**state.weights, name: torch.full_like(state.weights[name], math.inf)})
        with pytest.raises(Misfit, match=r"q_proj.*infinity"):
            engine.load_adapter("a", bad, LORA)
        assert engine.resident() == frozenset()

    def test_a_closed_engine_holds_none(self, trainer: LoraTrainer, base: Path) -> None:
        engine = engine_over(base)
        engine.load_adapter("a", trainer.weights(trainer.initial()), LORA)
        engine.close()
        assert engine.resident() == frozenset()
        with pytest.raises(ContractError, match="start"):
            engine.load_adapter("b", trainer.weights(trainer.initial()), LORA)


def after(tokens: int) -> Callable[[], bool]:
    left = iter([False] * tokens)
    return lambda: next(left, True)


def as_tensors(found: Pieces) -> dict[str, Tensor]:
    return {name: torch.frombuffer(bytearray(p.data), dtype=torch.float32).view(p.shape) for name, p in found.items()}


def greedy(policy: Policy) -> tuple[int, ...]:
    ids = list(PROMPT.ids)
    with torch.no_grad():
        for _ in range(PROMPT.max_tokens):
            ids.append(int(policy(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(PROMPT.ids) :])


VERIFIERS: dict[str, Callable[[int], int]] = {"digit": lambda digit: digit, "successor": lambda digit: (digit + 1) % 10}


def test_two_adapters_learn_two_tasks_over_one_frozen_base(tmp_path: Path) -> None:
    """Sampled by one engine, in the same batches; they take turns in one trainer. The base is random, and drawn wide:
    its output head, beside which no adapter stands, bounds how sure an answer can be."""
    config, chance = PolicyConfig(qk_norm=True, init_std=0.1, hidden=128, ffn=256), random.Random(0)
    wide = new_policy(config, 0)
    save_file({name: each.detach() for name, each in wide.named_parameters()}, tmp_path / "base")
    trainer, engine = (
        LoraTrainer(config, tmp_path / "base", LORA, Hyper(lr=5e-3)),
        engine_over(tmp_path / "base", config),
    )
    states = dict.fromkeys(VERIFIERS, trainer.initial())
    rewards: dict[str, list[float]] = {task: [] for task in VERIFIERS}
    for version in range(12):
        asked = {task: ask(chance, version) for task in states}
        answers = sampled(engine, trainer, states, asked)
        for task in states:
            samples = judge(asked[task], answers[task], VERIFIERS[task])
            states[task], metrics = trainer.train(states[task], samples, version)
            rewards[task].append(metrics["reward_mean"])
    assert all(found[0] < 0.2 and max(found) > 0.6 for found in rewards.values()), rewards
    asked = dict.fromkeys(states, ask(chance, 12))
    answers = sampled(engine, trainer, states, asked)
    for task, other in (("digit", "successor"), ("successor", "digit")):
        earned = [sample.reward for sample in judge(asked[task], answers[task], VERIFIERS[other])]
        assert sum(earned) / len(earned) < 0.2, f"what learned {task} does {other}"


def sampled(
    engine: TorchEngine, trainer: LoraTrainer, states: dict[str, State], asked: dict[str, list[tuple[int, Prompt]]]
) -> dict[str, list[Completion]]:
    """Of every task with its own adapter, all in one batch."""
    for task, state in states.items():
        assert engine.unload_adapter(task) == ""
        engine.load_adapter(task, trainer.weights(state), LORA)
    prompts = [replace(prompt, adapter=task) for task in states for _, prompt in asked[task]]
    answers = iter(engine.generate(prompts))
    return {task: [next(answers) for _ in asked[task]] for task in states}
