"""The torch engine and the torch trainer: each against its contract, then both learning `digit` together.

Knows: the two backends, and formulas written out by hand. Must not know: the log, transports, or consumers.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load, save, save_file

from consumers.reef_engine.torch_backend import TorchEngine
from consumers.reef_trainer.torch_backend import Hyper, State, TorchTrainer, adam, advantages, objective, pack
from reef_bus import tokens
from reef_bus.backends import Completion, Pieces, Prompt, Sample
from reef_bus.errors import ContractError, Rejected
from reef_bus.policy import PolicyConfig, new_policy

CONFIG = PolicyConfig()
TIMELESS = ("reward_mean", "reward_std", "loss", "clip_fraction", "approx_kl", "entropy", "grad_norm", "lr")


def push(source: Pieces, live: Pieces) -> None:
    assert list(source) == list(live)
    for name, piece in source.items():
        live[name].data[:] = piece.data


def loaded(state: State | None = None, seed: int = 0) -> TorchEngine:
    trainer, engine = TorchTrainer(), TorchEngine(seed=seed)
    engine.start()
    push(trainer.weights(state or trainer.initial()), engine.live())
    return engine


def digest(found: Pieces) -> str:
    return hashlib.sha256(b"".join(name.encode() + piece.data for name, piece in found.items())).hexdigest()


def whole_digest(trainer: TorchTrainer, state: State) -> str:
    return digest(trainer.weights(state)) + hashlib.sha256(trainer.optimizer(state)).hexdigest()


def sample(reward: float, group: str = "g", **changes: object) -> Sample:
    """A sample of the base model's length and near its logprobs."""
    plain = {
        "record": "r",
        "group": group,
        "prompt": (11, 3, 10),
        "completion": (3, 5, 3, 3),
        "logprobs": (-2.7, -2.8, -2.7, -2.8),
        "load_id": "w0",
        "reward": reward,
    }
    return Sample(**{**plain, **changes})  # type: ignore[arg-type]


def batch() -> list[Sample]:
    """Two groups with prompts and completions of different lengths."""
    long = {"prompt": (11, 1, 2, 10), "completion": (1,), "logprobs": (-2.5,)}
    other = [sample(0.0, "h", **long), sample(1.0, "h", **{**long, "completion": (2, 9), "logprobs": (-2.9, -3.0)})]
    return [sample(0.75), sample(0.0, completion=(9, 5, 0, 15)), sample(0.25), *other]


class TestEngine:
    def test_live_views_are_writable_and_always_the_same(self) -> None:
        engine = TorchEngine()
        engine.start()
        first = engine.live()
        assert all(piece.data is engine.live()[name].data for name, piece in first.items())
        assert not any(piece.data.readonly for piece in first.values())
        assert sum(piece.data.nbytes for piece in first.values()) == 304_384

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_memory_that_was_never_loaded_cannot_answer(self, temperature: float) -> None:
        engine = TorchEngine()
        engine.start()
        with pytest.raises(ContractError, match="not finite"):
            engine.generate([Prompt(ids=(11, 3, 10), max_tokens=4, temperature=temperature)])

    def test_one_missing_tensor_is_enough_to_refuse(self) -> None:
        engine = loaded()
        engine.live()["model.layers.1.mlp.up_proj.weight"].data[:] = b"\xff" * (128 * 64 * 4)
        with pytest.raises(ContractError, match="not finite"):
            engine.generate([Prompt(ids=(11, 3, 10), max_tokens=1)])

    def test_the_next_answer_is_from_what_was_written_last(self) -> None:
        """A head that is zero but for one row of ones, and a norm that makes that row's logit positive."""
        engine, prompt = loaded(), Prompt(ids=(11, 3, 10), max_tokens=3, temperature=0.0)
        signs = np.sign(before_the_head(prompt)).astype(np.float32).tobytes()
        before = engine.generate([prompt])
        for wanted in (6, 9):
            head = np.zeros((16, 64), np.float32)
            head[wanted] = 1
            engine.live()["lm_head.weight"].data[:] = head.tobytes()
            engine.live()["model.norm.weight"].data[:] = signs
            assert engine.generate([Prompt(ids=prompt.ids, max_tokens=1, temperature=0.0)])[0].ids == (wanted,)
        push(TorchTrainer().weights(TorchTrainer().initial()), engine.live())
        assert engine.generate([prompt]) == before

    def test_mixed_prompts_are_answered_in_order_and_as_alone(self) -> None:
        engine = loaded()
        prompts = [
            Prompt(ids=(11, 3, 10), max_tokens=4, seed=1),
            Prompt(ids=(11, 3, 4, 10), max_tokens=2, seed=2),
            Prompt(ids=(11, 5, 10), max_tokens=4, seed=3),
            Prompt(ids=(11, 5, 10), max_tokens=4, seed=3, temperature=0.5),
            Prompt(ids=(11, 5, 10), max_tokens=4, temperature=0.0),
        ]
        together = engine.generate(prompts)
        assert [len(answer.ids) for answer in together] == [4, 2, 4, 4, 4]
        for prompt, answer in zip(prompts, together, strict=True):
            alone = engine.generate([prompt])[0]
            assert alone.ids == answer.ids
            assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-5)

    def test_no_id_ends_an_answer(self) -> None:
        engine = loaded()
        answers = engine.generate([Prompt(ids=(11, 3, 10), max_tokens=29, seed=seed) for seed in range(20)])
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert all(len(answer.ids) == len(answer.logprobs) == 29 for answer in answers)
        assert any(tokens.EOS in answer.ids[:-1] for answer in answers)

    def test_a_seed_repeats_and_its_absence_does_not(self) -> None:
        engine, prompt = loaded(seed=7), Prompt(ids=(11, 3, 10), max_tokens=16)
        assert engine.generate([prompt]) != engine.generate([prompt])
        assert loaded(seed=7).generate([prompt, prompt]) == loaded(seed=7).generate([prompt, prompt])
        seeded = Prompt(ids=(11, 3, 10), max_tokens=16, seed=-(2**70))
        assert engine.generate([seeded]) == engine.generate([seeded])

    def test_nothing_asked_is_nothing_answered(self) -> None:
        assert loaded().generate([]) == []

    @pytest.mark.parametrize(
        ("prompt", "named"),
        [
            (Prompt(ids=(), max_tokens=1), r"\(\)"),
            (Prompt(ids=(11, 16), max_tokens=1), "16"),
            (Prompt(ids=(-1,), max_tokens=1), "-1"),
            (Prompt(ids=(11, 3, 10), max_tokens=30), "30.*1 to 29"),
            (Prompt(ids=(11, 3, 10), max_tokens=0), "max_tokens 0"),
            (Prompt(ids=(11,), max_tokens=1, temperature=-0.5), "-0.5"),
            (Prompt(ids=(11,), max_tokens=1, temperature=math.nan), "nan"),
        ],
    )
    def test_an_impossible_prompt_is_rejected_with_what_was_found(self, prompt: Prompt, named: str) -> None:
        with pytest.raises(Rejected, match=named):
            loaded().generate([prompt])

    def test_a_closed_engine_says_so(self) -> None:
        engine = loaded()
        engine.close()
        engine.close()
        for call in (engine.live, lambda: engine.generate([])):
            with pytest.raises(ContractError, match="start"):
                call()


def before_the_head(prompt: Prompt) -> npt.NDArray[np.float32]:
    """What the base model's output head sees at the prompt's end: a head of one's own shows it."""
    policy = new_policy(CONFIG, 0)
    policy.lm_head.weight = torch.nn.Parameter(torch.eye(64))
    with torch.no_grad():
        return np.asarray(policy(torch.tensor([prompt.ids]))[0, -1].numpy())


class TestTrainer:
    def test_the_base_model_is_the_same_on_every_call(self) -> None:
        trainer = TorchTrainer()
        assert whole_digest(trainer, trainer.initial()) == whole_digest(trainer, TorchTrainer().initial())

    def test_weights_are_read_only(self) -> None:
        trainer = TorchTrainer()
        assert all(piece.data.readonly for piece in trainer.weights(trainer.initial()).values())

    def test_training_leaves_its_input_alone_and_repeats_to_the_bit(self) -> None:
        trainer = TorchTrainer()
        state, _ = trainer.train(trainer.initial(), batch(), 0)
        before = whole_digest(trainer, state)
        first, metrics = trainer.train(state, batch(), 1)
        again, repeated = trainer.train(state, batch(), 1)
        assert whole_digest(trainer, state) == before != whole_digest(trainer, first)
        assert whole_digest(trainer, first) == whole_digest(trainer, again)
        assert [metrics[name] for name in TIMELESS] == [repeated[name] for name in TIMELESS]

    def test_the_seed_orders_the_minibatches(self) -> None:
        trainer, start = TorchTrainer(), TorchTrainer().initial()
        assert len({digest(trainer.weights(trainer.train(start, batch(), seed)[0])) for seed in range(4)}) > 1

    def test_metrics_are_finite_and_complete(self) -> None:
        _, metrics = TorchTrainer().train(TorchTrainer().initial(), batch(), 0)
        assert set(metrics) == {*TIMELESS, "seconds"}
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["reward_mean"] == pytest.approx(0.4)
        assert metrics["reward_std"] == pytest.approx(math.sqrt((0.35**2 + 2 * 0.4**2 + 0.15**2 + 0.6**2) / 5))
        assert metrics["entropy"] == pytest.approx(math.log(16), abs=0.1)  # the base model is nearly uniform

    def test_warm_up_counts_versions(self) -> None:
        trainer, state, rates = TorchTrainer(), TorchTrainer().initial(), []
        for _ in range(4):
            state, metrics = trainer.train(state, batch(), 0)
            rates.append(metrics["lr"])
        assert rates == pytest.approx([0.001, 0.002, 0.003, 0.003])
        assert (state.versions, state.steps) == (4, 8)

    def test_a_batch_smaller_than_the_minibatches_takes_fewer_steps(self) -> None:
        state, _ = TorchTrainer(hyper=Hyper(minibatches=8)).train(TorchTrainer().initial(), batch()[:3], 0)
        assert state.steps == 3

    def test_saving_and_loading_goes_on_to_the_bit(self, tmp_path: Path) -> None:
        trainer = TorchTrainer()
        state, _ = trainer.train(trainer.initial(), batch(), 0)
        weights, optimizer = saved(trainer, state, tmp_path)
        resumed = trainer.load(weights, optimizer)
        for path in (weights, optimizer):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        assert whole_digest(trainer, resumed) == whole_digest(trainer, state)
        there, here = trainer.train(resumed, batch(), 1)[0], trainer.train(state, batch(), 1)[0]
        assert whole_digest(trainer, there) == whole_digest(trainer, here)
        assert list(trainer.weights(resumed)) == list(loaded().live())

    def test_a_qwen3_is_trained_saved_and_loaded_like_a_llama(self, tmp_path: Path) -> None:
        """Its norms are parameters like all others: each moves, and comes back with both of its moments."""
        trainer = TorchTrainer(PolicyConfig(qk_norm=True))
        start = trainer.initial()
        state, _ = trainer.train(start, batch(), 0)
        norms = [name for name in state.weights if name.endswith(("q_norm.weight", "k_norm.weight"))]
        assert len(norms) == 4
        assert not any(torch.equal(state.weights[name], start.weights[name]) for name in norms)
        resumed = trainer.load(*saved(trainer, state, tmp_path))
        assert whole_digest(trainer, resumed) == whole_digest(trainer, state)
        with pytest.raises(ContractError, match="k_norm"):
            TorchTrainer().load(tmp_path / "weights", None)

    def test_weights_alone_start_a_fresh_optimizer(self, tmp_path: Path) -> None:
        trainer = TorchTrainer()
        state, _ = trainer.train(trainer.initial(), batch(), 0)
        fresh = trainer.load(saved(trainer, state, tmp_path)[0], None)
        assert digest(trainer.weights(fresh)) == digest(trainer.weights(state))
        assert trainer.optimizer(fresh) == trainer.optimizer(trainer.initial())

    def test_a_damaged_file_is_a_contract_error_that_names_it(self, tmp_path: Path) -> None:
        trainer = TorchTrainer()
        weights, optimizer = saved(trainer, trainer.initial(), tmp_path)
        good = load(weights.read_bytes())
        damaged: dict[str, tuple[bytes, str]] = {
            "cut": (weights.read_bytes()[:-1], "cut"),
            "missing": (save({name: t for name, t in good.items() if name != "lm_head.weight"}), "lm_head"),
            "extra": (save({**good, "bias": torch.zeros(1)}), "bias"),
            "shape": (save({**good, "model.norm.weight": torch.ones(65)}), "model.norm.weight"),
            "type": (save({name: t.bfloat16() for name, t in good.items()}), "bfloat16"),
            "nan": (save({**good, "model.norm.weight": torch.full((64,), math.nan)}), "model.norm.weight"),
        }
        for name, (content, named) in damaged.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ContractError, match=named):
                trainer.load(tmp_path / name, None)
        for wrong in (weights, tmp_path / "absent"):
            with pytest.raises(ContractError, match=wrong.name):
                trainer.load(weights, wrong)
        assert trainer.load(weights, optimizer).steps == 0

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"completion": (), "logprobs": ()}, "0 completion"),
            ({"prompt": ()}, "0 prompt"),
            ({"completion": (1,) * 30, "logprobs": (-1.0,) * 30}, "32"),
            ({"logprobs": (-1.0,)}, "1 logprobs for 4"),
            ({"completion": (3, 3, 3, 16)}, "16"),
            ({"logprobs": (-1.0, -1.0, -1.0, -math.inf)}, "not finite"),
            ({"reward": math.nan}, "not finite"),
        ],
    )
    def test_a_sample_that_cannot_be_trained_on_is_named(self, changes: dict[str, object], named: str) -> None:
        bad = sample(**{"reward": 1.0, "record": "bad-one", **changes})  # type: ignore[arg-type]
        with pytest.raises(ContractError, match=f"bad-one.*{named}"):
            TorchTrainer().train(TorchTrainer().initial(), [sample(0.0), bad], 0)

    def test_an_empty_batch_is_refused(self) -> None:
        with pytest.raises(ContractError, match="empty"):
            TorchTrainer().train(TorchTrainer().initial(), [], 0)

    def test_an_update_that_is_not_finite_is_not_returned(self) -> None:
        absurd = [sample(0.0, logprobs=(-900.0,) * 4), sample(1.0)]
        with pytest.raises(ContractError, match="loss is not finite"):
            TorchTrainer().train(TorchTrainer().initial(), absurd, 0)
        with pytest.raises(ContractError, match=r"weights after the update: .* is not finite"):
            TorchTrainer(hyper=Hyper(lr=1e39, minibatches=1)).train(TorchTrainer().initial(), batch(), 0)


def saved(trainer: TorchTrainer, state: State, folder: Path) -> tuple[Path, Path]:
    """As an artifact store would: the pieces in a safetensors file, the optimizer's bytes beside it."""
    tensors = {
        name: torch.frombuffer(bytearray(piece.data), dtype=torch.float32).view(piece.shape)
        for name, piece in trainer.weights(state).items()
    }
    save_file(tensors, folder / "weights")
    (folder / "optimizer").write_bytes(trainer.optimizer(state))
    return folder / "weights", folder / "optimizer"


class TestFormulas:
    def test_advantages_are_normalised_within_their_group(self) -> None:
        found = advantages([sample(1.0), sample(0.0), sample(0.5, "h"), sample(0.5, "h"), sample(9.0, "alone")])
        assert found == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001, 0.0, 0.0, 0.0])

    def test_adam_moves_by_the_rate_against_a_constant_gradient(self) -> None:
        """With g constant both corrected moments are g and g², so every step is rate · sign(g), whatever the betas."""
        zero = {"w": torch.zeros(3)}
        state = State({"w": torch.tensor([1.0, 2.0, 3.0])}, zero, zero, 0, 0)
        for _ in range(3):
            state = adam(state, {"w": torch.tensor([0.5, -4.0, 0.0])}, 0.01, Hyper())
        torch.testing.assert_close(state.weights["w"], torch.tensor([0.97, 2.03, 3.0]))
        assert state.steps == 3

    def test_the_objective_by_hand(self) -> None:
        """Uniform policy (a zero head): every logprob is -log 16, so the recorded ones choose the ratios."""
        policy = new_policy(CONFIG, 0)
        with torch.no_grad():
            policy.lm_head.weight.zero_()
        ratios = [(1.0, 1.1), (1.5, 0.5, 1.0), (1.5,)]
        rewards = [1.0, 0.0, 0.0]
        rows = [
            sample(reward, completion=(1,) * len(row), logprobs=tuple(-math.log(16) - math.log(r) for r in row))
            for reward, row in zip(rewards, ratios, strict=True)
        ]
        up, down = (2 / 3) / (math.sqrt(2) / 3 + 1e-4), (-1 / 3) / (math.sqrt(2) / 3 + 1e-4)
        # A ratio of 0.5 counts as 0.8 for a bad answer; 1.5 is not clipped there, the worse of the two is taken.
        gains = [1.0 * up, 1.1 * up, 1.5 * down, 0.8 * down, 1.0 * down, 1.5 * down]
        loss, figures = objective(policy, pack(rows, CONFIG), 0.2)
        assert float(loss.detach()) == pytest.approx(-sum(gains) / 6, abs=1e-6)
        assert float(figures["clip_fraction"]) == pytest.approx(3 / 6)
        assert float(figures["entropy"]) == pytest.approx(math.log(16))
        flat = [r for row in ratios for r in row]
        assert float(figures["approx_kl"]) == pytest.approx(sum(r - 1 - math.log(r) for r in flat) / 6, abs=1e-6)

    def test_padding_weighs_nothing(self) -> None:
        policy, packed = new_policy(CONFIG, 0), pack(batch(), CONFIG)
        ids, mask, behaviour = (torch.nn.functional.pad(tensor, (0, 5), value=0) for tensor in packed[:3])
        wide = packed._replace(ids=ids, mask=mask, behaviour=behaviour)
        losses = [objective(policy, part, 0.2)[0].detach() for part in (packed, wide)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)

    def test_answers_beyond_the_clip_teach_nothing(self) -> None:
        """Better and already likelier, worse and already rarer: the gradient is exactly zero."""
        trainer, start = TorchTrainer(), TorchTrainer().initial()
        settled = [sample(1.0, logprobs=(-4.0,) * 4), sample(0.0, logprobs=(-1.0,) * 4)]
        assert digest(trainer.weights(trainer.train(start, settled, 0)[0])) == digest(trainer.weights(start))
        wanting = [sample(1.0, logprobs=(-1.0,) * 4), sample(0.0, logprobs=(-4.0,) * 4)]
        assert digest(trainer.weights(trainer.train(start, wanting, 0)[0])) != digest(trainer.weights(start))


def ask(chance: random.Random, version: int) -> list[tuple[int, Prompt]]:
    digits = [chance.randrange(10) for _ in range(16)]
    prompts = [tokens.render([{"role": "user", "content": str(digit)}]) for digit in digits]
    return [
        (place, Prompt(ids=prompt, max_tokens=4, seed=version * 10_000 + place * 100 + copy))
        for place, prompt in enumerate(prompts)
        for copy in range(16)
    ]


def same(digit: int) -> int:
    return digit


def judge(
    asked: Sequence[tuple[int, Prompt]], answers: Sequence[Completion], wanted: Callable[[int], int] = same
) -> list[Sample]:
    """The reward is the share of the answer that is as wanted; in task `digit`, that repeats the digit."""
    return [
        Sample(
            record=f"r{number}",
            group=f"g{place}",
            prompt=prompt.ids,
            completion=answer.ids,
            logprobs=answer.logprobs,
            load_id="w",
            reward=answer.ids.count(wanted(prompt.ids[1])) / 4,
        )
        for number, ((place, prompt), answer) in enumerate(zip(asked, answers, strict=True))
    ]


def learn(seed: int, versions: int, config: PolicyConfig = CONFIG) -> list[dict[str, float]]:
    trainer, chance = TorchTrainer(config, Hyper(seed=seed)), random.Random(seed)
    state, engine, history = trainer.initial(), TorchEngine(config), []
    engine.start()
    for version in range(versions):
        push(trainer.weights(state), engine.live())
        asked = ask(chance, version)
        state, metrics = trainer.train(state, judge(asked, engine.generate([prompt for _, prompt in asked])), version)
        history.append(metrics)
    return history


@pytest.mark.parametrize("config", [CONFIG, PolicyConfig(qk_norm=True)], ids=["llama", "qwen3"])
def test_trainer_and_engine_learn_the_digit_task(config: PolicyConfig) -> None:
    rewards = [metrics["reward_mean"] for metrics in learn(seed=0, versions=24, config=config)]
    assert rewards[0] < 0.2
    assert min(rewards[-2:]) > 0.9


def test_the_trainer_recomputes_the_engines_logprobs() -> None:
    """One minibatch on policy: every ratio is 1, so nothing is clipped and the divergence is zero."""
    asked = ask(random.Random(0), 0)
    drawn = judge(asked, loaded().generate([prompt for _, prompt in asked]))
    _, metrics = TorchTrainer(hyper=Hyper(minibatches=1)).train(TorchTrainer().initial(), drawn, 0)
    assert metrics["clip_fraction"] == 0
    assert abs(metrics["approx_kl"]) < 1e-8
