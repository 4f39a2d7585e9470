"""What surrounds an SGLang server, as far as it needs none: its configuration, flags, the room, adapters, sums.

Knows: the modules beside the backend. Must not know: SGLang, which need not be installed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.numpy

from consumers.reef_engine.sglang.adapters import Held, _furthest, incomplete, layouts
from consumers.reef_engine.sglang.borrowed import _wrong
from consumers.reef_engine.sglang.launch import (
    SHIMS,
    adapter_flags,
    environment,
    model_flags,
    server_flags,
)
from consumers.reef_engine.sglang.limits import Limits
from consumers.reef_engine.sglang.moves import _Group, sender
from consumers.reef_engine.sglang.room import Room, place
from consumers.reef_engine.sglang.start import KEY, _key
from consumers.reef_engine.sglang.sums import Sums, flaw
from reef_bus.backends import Piece
from reef_bus.config import OPTIONS, Inference, build
from reef_bus.errors import Misfit, Rejected, TransferError, Unavailable
from reef_bus.events import Lora
from reef_bus.model_folder import read_policy_config, write_model_folder
from reef_bus.peft_folder import read_peft_folder
from reef_bus.policy import PolicyConfig
from reef_bus.sections import Adapters

CONFIG = PolicyConfig(qk_norm=True, layers=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model_folder(tmp_path / "model", CONFIG)
    return tmp_path / "model"


# -- configuration


def configured(model: Path, **inference: Any) -> Inference:
    return build("test", {"inference": {"backend": "sglang", "model-path": str(model), **inference}}).inference


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_that_another_key_stands_for_is_refused_with_that_key(model: Path, name: str) -> None:
    for spelled in (name, f"--{name}", name.replace("-", "_")):
        with pytest.raises(Rejected, match=f"names '{spelled}': set {OPTIONS[name]} instead"):
            configured(model, options={spelled: 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model-path": "nowhere"}, "inference.model-path is 'nowhere'"),
        ({"device": "tpu"}, "inference.device is 'tpu'; expected auto, cpu or cuda"),
        ({"update": "mail"}, "inference.update is 'mail'; expected one of broadcast, tensors, disk"),
        ({"tensor-parallel-size": 0}, "inference.tensor-parallel-size is 0"),
        ({"start-s": 0.0}, "inference.start-s is 0"),
        (
            {"urls": {"engine-7": "http://x"}},
            "inference.urls names 'engine-7'; inference.engines are engine-0, engine-1",
        ),
        ({"urls": {"engine-0": "http://x"}, "update": "disk"}, "inference.update disk"),
        *(
            ({"urls": {"engine-0": url}}, r"inference.urls has '.*' for engine-0; expected http://host:port")
            for url in (
                "",
                "localhost/x",
                "host:30000",
                "http://",
                "http://[::1",
                "http://x:y",
                "http://x:1 ",
                "http://ö",
            )
        ),
        ({"urls": {"engine-0": "http://x", "engine-1": "http://x/"}}, "inference.urls names one server twice"),
        ({"urls": {"engine-0": "http://x"}}, "inference.host is '127.0.0.1', where http://x would look"),
        ({"options": {"tensor-par": 2}}, "names 'tensor-par': set inference.tensor-parallel-size instead"),
        ({"backend": "vllm"}, "inference.backend is 'vllm'; this version has: torch, sglang"),
    ],
)
def test_what_no_server_can_be_started_with_is_refused_with_its_key(
    model: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(Rejected, match=said):
        configured(model, **wrong)


# -- a server that is borrowed

AS_CONFIGURED = {"tp_size": 1, "tokenizer_worker_num": 1, "dtype": "auto"}
AS_CONFIGURED |= {"disable_radix_cache": True, "disable_overlap_schedule": True}
TAKES = {"enable_lora": True, "max_loaded_loras": None, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
TAKES_NONE = {"enable_lora": None, "max_loaded_loras": None, "max_lora_rank": None, "lora_target_modules": None}
TWO = Adapters(scenarios=("red",), rank=8, targets=("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, ""),
        ({"tp_size": 2}, "has 2 ranks: set inference.tensor-parallel-size"),
        ({"tokenizer_worker_num": 2}, "has tokenizer workers that each name another version"),
        ({"dtype": "bfloat16"}, "was started with --dtype bfloat16: set inference.dtype"),
        ({"disable_radix_cache": False}, "has a prefix cache: set inference.prefix-cache"),
        ({"disable_overlap_schedule": False}, "counts a token to the wrong version"),
    ],
)
def test_a_borrowed_server_is_as_configured(model: Path, said: dict[str, Any], found: str) -> None:
    inference = configured(model, **{"prefix-cache": False})
    answer = _wrong({**AS_CONFIGURED, **TAKES_NONE, **said}, inference, Adapters(), spans=True)
    assert answer.startswith(found) and bool(answer) == bool(found)


def test_batches_of_a_borrowed_server_may_overlap_where_an_answer_is_of_one_version(model: Path) -> None:
    said = {**AS_CONFIGURED, **TAKES_NONE, "disable_overlap_schedule": False}
    assert _wrong(said, configured(model), Adapters(), spans=False) == ""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, ""),
        ({"max_lora_rank": 16, "lora_target_modules": ["v_proj", "o_proj", "q_proj"]}, ""),
        ({"enable_lora": False}, "takes no adapters: start it with --enable-lora"),
        ({"enable_lora": None}, "takes no adapters: start it with --enable-lora"),
        ({"max_loaded_loras": 8}, "makes room for adapters by itself: start it without --max-loaded-loras"),
        ({"max_lora_rank": 4}, "takes adapters of rank 4 at most: start it with --max-lora-rank 8"),
        (
            {"lora_target_modules": ["q_proj"]},
            "takes no adapters with v_proj: start it with --lora-target-modules q_proj v_",
        ),
    ],
)
def test_a_borrowed_server_takes_adapters_as_configured(model: Path, said: dict[str, Any], found: str) -> None:
    answer = _wrong({**AS_CONFIGURED, **TAKES, **said}, configured(model), TWO, spans=True)
    assert answer.startswith(found) and bool(answer) == bool(found)


@pytest.mark.parametrize(
    ("given", "key"), [("", ""), ("abc", "abc"), ("abc\n", "abc"), ("a\nb", None), ("schlüssel", None)]
)
def test_the_key_of_a_borrowed_server_is_one_that_a_header_takes(
    monkeypatch: pytest.MonkeyPatch, given: str, key: str | None
) -> None:
    monkeypatch.setenv(KEY, given)
    if key is not None:
        assert _key() == key
    else:
        with pytest.raises(Rejected, match=r"^SGLANG_API_KEY has characters that no key has") as found:
            _key()
        assert given not in str(found.value)


@pytest.mark.parametrize("name", [*AS_CONFIGURED, *TAKES])
def test_a_borrowed_server_that_does_not_say_all_that_is_read_is_another_version(model: Path, name: str) -> None:
    """Whatever the name is now, what we would take for its value need not be so. Nor may it be of another kind."""
    said: dict[str, Any] = {**AS_CONFIGURED, **TAKES}
    for wrong in ({each: said[each] for each in said if each != name}, {**said, name: object()}):
        answer = _wrong(wrong, configured(model), TWO, spans=True)
        assert answer.startswith("is of another version than ours, by its /server_info: ") and name in answer


# -- start


def test_a_server_has_room_in_a_batch_for_every_adapter_and_the_base_model_and_unloads_none_by_itself() -> None:
    adapters = Adapters(scenarios=("red", "green"), rank=4, targets=("q_proj", "v_proj"))
    flags = ["--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "q_proj", "v_proj"]
    assert adapter_flags(adapters, "cuda") == [*flags, "--max-loras-per-batch", "4"]
    assert adapter_flags(adapters, "cpu") == [*adapter_flags(adapters, "cuda"), "--lora-backend", "torch_native"]
    assert adapter_flags(Adapters(), "cpu") == []


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        ("q_proj", "v_proj"),
        ("v_proj", "q_proj"),
        ("k_proj v_proj", "q_proj"),
        ("o_proj up_proj", "gate_proj"),
        ("q_proj v_proj", ""),
        ("gate_proj", ""),
        ("down_proj o_proj", ""),
    ],
)
def test_targets_that_the_server_fuses_come_together(targets: str, missing: str) -> None:
    found = incomplete(targets.split())
    assert found.endswith(f"add {missing} to adapters.targets") if missing else found == ""


def test_an_adapter_has_two_tensors_for_each_layer_that_is_a_target() -> None:
    base = {"model.layers.0.mlp.down_proj.weight": ("F32", (64, 128), 0), "model.norm.weight": ("F32", (64,), 0)}
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    assert dict(layouts(base, Lora(8, 16, ("down_proj", "q_proj")))) == {
        f"{layer}.lora_A.weight": ("F32", (8, 128), 4096),
        f"{layer}.lora_B.weight": ("F32", (64, 8), 2048),
    }


def test_flags_are_derived_from_the_configuration(model: Path) -> None:
    options = {"mem-fraction-static": 0.5, "enable-metrics": True, "log-requests": False}
    found = configured(model, **{"tensor-parallel-size": 4, "max-batch": 7, "prefix-cache": False, "options": options})
    flags = [*model_flags(found, model, "cuda"), *server_flags(found, 1234, "boot", "cuda", spans=True)]
    pairs = dict(itertools.pairwise(flags))
    assert pairs["--tp-size"] == "4" and pairs["--max-running-requests"] == "7" and pairs["--port"] == "1234"
    assert pairs["--mem-fraction-static"] == "0.5" and pairs["--api-key"] == "boot" and pairs["--host"] == "127.0.0.1"
    assert {"--enable-metrics", "--disable-radix-cache", "--disable-overlap-schedule"} <= set(flags)
    assert not {"--log-requests", "torch_native", "--disable-cuda-graph"} & set(flags)
    assert pairs["--load-format"] == "dummy"


def test_batches_overlap_and_prefixes_are_kept_where_no_answer_is_made_by_several_versions(model: Path) -> None:
    found = configured(model)
    assert not {"--disable-radix-cache", "--disable-overlap-schedule", "--sleep-on-idle"} & set(
        server_flags(found, 1, "boot", "cuda", spans=False)
    )


def test_an_option_overrides_what_is_chosen_for_a_cpu(model: Path) -> None:
    """The last one counts."""
    flags = model_flags(configured(model, options={"max-total-tokens": 99}), model, "cpu")
    assert flags[len(flags) - 1 - flags[::-1].index("--max-total-tokens") + 1] == "99"


def test_the_shims_are_on_the_path_only_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert environment("cpu", tmp_path)["PYTHONPATH"].split(":") == [str(SHIMS), "mine"]
    assert environment("cuda", tmp_path)["PYTHONPATH"] == "mine"
    assert "SGLANG_USE_CPU_ENGINE" not in environment("cuda", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{SHIMS}/:mine")  # as make demo-sglang starts us
    assert environment("cpu", tmp_path)["PYTHONPATH"].split(":") == [str(SHIMS), "mine"]
    assert environment("cuda", tmp_path)["PYTHONPATH"] == "mine"
    monkeypatch.delenv("PYTHONPATH")
    assert environment("cpu", tmp_path)["PYTHONPATH"] == str(SHIMS)
    assert environment("cuda", tmp_path)["PYTHONPATH"] == ""


@pytest.mark.parametrize("name", ["SGLANG_RETURN_ORIGINAL_LOGPROB", "SGL_RETURN_ORIGINAL_LOGPROB"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_gives_logprobs_of_what_it_samples_from_whatever_our_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    """With one of these, the second of which SGLang makes the first of, they would be of temperature 1."""
    monkeypatch.setenv(name, "1")
    assert name not in environment(device, tmp_path)


def test_ranks_on_a_cpu_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert environment("cpu", tmp_path, 2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,5"
    assert environment("cpu", tmp_path, 3)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2,5"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert environment("cpu", tmp_path, 2)["SGLANG_CPU_OMP_THREADS_BIND"] == "3|3"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment("cpu", tmp_path)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment("cuda", tmp_path, 2)


@pytest.mark.parametrize(
    ("device", "ranks", "options", "gpus", "found"),
    [
        ("cpu", 1, {}, 0, ("cpu", "gloo")),
        ("cpu", 1, {}, 8, ("cpu", "gloo")),
        ("cuda", 1, {}, 1, ("cpu", "gloo")),
        ("cuda", 1, {}, 2, ("cuda:1", "nccl")),
        ("cuda", 2, {}, 2, ("cpu", "gloo")),
        ("cuda", 2, {}, 8, ("cuda:2", "nccl")),
        ("cuda", 2, {"base-gpu-id": 4}, 6, ("cpu", "gloo")),
        ("cuda", 2, {"base-gpu-id": "4"}, 8, ("cuda:6", "nccl")),
        ("cuda", 2, {"gpu-id-step": 2}, 4, ("cpu", "gloo")),
        ("cuda", 2, {"base-gpu-id": 1, "gpu-id-step": 2}, 8, ("cuda:5", "nccl")),
    ],
)
def test_what_is_broadcast_comes_from_a_gpu_that_is_none_of_the_servers_or_from_the_host(
    device: str, ranks: int, options: dict[str, str | int], gpus: int, found: tuple[str, str]
) -> None:
    assert sender(device, ranks, options, gpus) == found


class Restarted:
    """A server that has no group any more."""

    def post(self, route: str, *_: Any) -> Any:
        if route == "destroy_weights_update_group":
            raise TransferError("refused", "The group to be destroyed does not exist.")


def test_a_group_that_the_server_has_left_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    monkeypatch.setattr("torch.distributed.destroy_process_group", left.append)
    monkeypatch.setattr(_Group, "_join", lambda group, port: setattr(group, "_group", group.name))
    group = _Group(Restarted(), 1, ("cpu", "gloo"), "127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="does not exist"), group:
        pass
    assert left == [group.name]


class Mute:
    """A server that holds nothing, and must not be sent anything."""

    def get(self, route: str) -> Any:
        return {"data": []}


def held(model: Path, folder: Path) -> Held:
    room = Room(model, folder)
    room.fit({"model.layers.0.mlp.down_proj.weight": ("F32", (4, 6), 96)})
    config = build("test", {"adapters": {"scenarios": ["a"], "rank": 2, "targets": ["down_proj"], "capacity": 2}})
    return Held(Mute(), room, None, config, "cpu")  # type: ignore[arg-type]


def down(rank: int) -> dict[str, Piece]:
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    sides = {f"{name}A.weight": (rank, 6), f"{name}B.weight": (4, rank)}
    return {each: Piece("F32", shape, memoryview(bytes(4 * shape[0] * shape[1]))) for each, shape in sides.items()}


@pytest.mark.parametrize(
    ("tensors", "lora", "said"),
    [
        (down(1), Lora(2, 4, ("down_proj",)), "expected"),
        (down(3), Lora(3, 4, ("down_proj",)), "the server was started for"),
        (dict(list(down(2).items())[:1]), Lora(2, 4, ("down_proj",)), "is missing"),
    ],
    ids=["another shape", "another rank", "half of it"],
)
def test_an_adapter_of_another_model_is_told_from_a_server_that_takes_none_now(
    model: Path, tmp_path: Path, tensors: dict[str, Piece], lora: Lora, said: str
) -> None:
    """The first is so for every boot, and the server hears nothing of it; the second, for this one."""
    server = held(model, tmp_path / "room")
    with pytest.raises(Misfit, match=said):
        server.load("new", tensors, lora)
    for name in ("one", "other"):
        server.room.keep(name, down(2), Lora(2, 4, ("down_proj",)))
    for name, why in (("one", "holds one of this name"), ("new", "holds 2 already")):
        with pytest.raises(TransferError, match=why) as found:
            server.load(name, tensors, lora)
        assert not isinstance(found.value, Misfit)
    server.room.close()


class Refusing(Mute):
    """It holds what it was given, and says to every call what it was told to."""

    def __init__(self, room: Room, said: str) -> None:
        self.room, self.said = room, said
        self.asked: list[tuple[str, bool]] = []  # the route, and whether the adapter's folder was there

    def post(self, route: str, *_: Any) -> Any:
        self.asked.append((route, self.room.adapter("one").exists()))
        raise TransferError("refused", f"/{route}: 400 {self.said}")


NONE = "Failed to implicitly load LoRA adapter one: "


@pytest.mark.parametrize(
    ("said", "flaw"),
    [
        (NONE + "Repo id must be in the form 'repo_name'", ""),
        ("Got LoRA adapter that has never been loaded: one", ""),
        (NONE + "LoRA adapter 'one' has an incomplete unload. Retry the unload", "has an incomplete unload"),
        ("Got LoRA adapter that has never been loaded: another", "another"),
    ],
)
def test_an_adapter_is_gone_when_the_server_knows_none_of_its_name(
    model: Path, tmp_path: Path, said: str, flaw: str
) -> None:
    server = held(model, tmp_path / "room")
    server.room.keep("one", down(2), Lora(2, 4, ("down_proj",)))
    server.client = refusing = Refusing(server.room, said)  # type: ignore[assignment]
    found = server.unload("one")
    assert flaw in found and bool(found) == bool(flaw)
    assert refusing.asked == [("unload_lora_adapter", False), ("generate", False)]  # else it would be loaded again


def test_a_folder_that_cannot_be_taken_away_is_a_leak_and_the_server_is_told_to_unload(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = held(model, tmp_path / "room")
    server.room.keep("one", down(2), Lora(2, 4, ("down_proj",)))
    server.client = refusing = Refusing(server.room, NONE)  # type: ignore[assignment]
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not yours")))
    assert "not yours" in server.unload("one")
    assert [route for route, _ in refusing.asked] == ["unload_lora_adapter", "generate"]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("off", [0.2, -0.2, math.nan, math.inf])
def test_one_logprob_that_is_something_else_is_found_wherever_it_is(place: int, off: float) -> None:
    expected = [-1.0, -2.0, -3.0]
    found = [each + off if number == place else each for number, each in enumerate(expected)]
    assert f"logprob {place + 1} of the probe" in _furthest(found, expected, 0.1)
    assert _furthest([-1.05, -2.0, -3.0], expected, 0.1) == ""


# -- the room


def test_what_is_written_into_the_room_is_a_safetensors_file(model: Path, tmp_path: Path) -> None:
    room = Room(model, tmp_path / "room")
    pieces = room.fit({"b": ("F32", (2,), 8), "a": ("I16", (3, 1), 6)})
    pieces["b"].data[:] = b"\x00\x00\x80\x3f\x00\x00\x00\x40"
    pieces["a"].data[:] = b"\x01\x00\x02\x00\x03\x00"
    found = safetensors.numpy.load_file(room.weights)
    assert found["b"].tolist() == [1.0, 2.0] and found["a"].tolist() == [[1], [2], [3]]
    there, here = (msgspec.json.decode((folder / "config.json").read_bytes()) for folder in (model, room.folder))
    assert here == there


def test_a_room_is_made_anew_for_other_tensors_and_nothing_of_an_earlier_boot_is_left(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "model-00001.safetensors").write_bytes(b"of an earlier boot")
    room = Room(model, folder)
    first = room.fit({"a": ("F32", (2,), 8)})
    assert room.fit({"a": ("F32", (2,), 8)}) is first
    assert room.fit({"a": ("F32", (1,), 4)}) is not first
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tmp"}
    room.close()
    assert not folder.exists()


def test_a_room_is_its_owners_alone(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "room"
    assert Room(model, folder).folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as where another user's folder cannot be removed
    with pytest.raises(Unavailable, match=r"cannot make .*File exists.*remove the folder"):
        Room(model, folder)


@pytest.mark.parametrize("said", [b'"\xff"', b"1e999"])
def test_a_configuration_that_is_damaged_where_nobody_looked_is_named(model: Path, tmp_path: Path, said: bytes) -> None:
    (model / "config.json").write_bytes(b'{"vocab_size": 9, "max_position_embeddings": 99, "other": %s}' % said)
    assert Limits.of(model).vocab_size == 9
    with pytest.raises(Rejected, match=r"config\.json cannot be read: "):
        Room(model, tmp_path / "room")


def test_weights_of_the_model_folder_are_not_copied(model: Path, tmp_path: Path) -> None:
    """They are not read: a version comes from the artifact store."""
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "a.pth", "tokenizer.json"):
        (model / name).write_bytes(b"{}")
    room = Room(model, tmp_path / "room")
    assert {file.name for file in room.folder.iterdir()} == {"config.json", "tokenizer.json", "tmp"}


def test_a_model_folder_is_not_taken_for_an_adapters(model: Path, tmp_path: Path) -> None:
    (model / "adapter_config.json").write_bytes(b'{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
    assert {file.name for file in Room(model, tmp_path / "room").folder.iterdir()} == {"config.json", "tmp"}


def test_they_are_there_while_a_server_starts_that_needs_some(model: Path, tmp_path: Path) -> None:
    names = ("model.safetensors.index.json", "model-1.safetensors", "model.safetensors", "a.bin", "b.pt")
    for name in (*names, "consolidated.safetensors", "training_args.bin", "c.onnx"):
        (model / name).write_bytes(b"the model's own")
    room = Room(model, tmp_path / "room")
    with contextlib.suppress(KeyError), room.with_weights(model):
        assert all((room.folder / name).read_bytes() == b"the model's own" for name in names)
        assert {file.name for file in room.folder.iterdir()} == {"config.json", "tmp", *names}
        raise KeyError  # as where the start fails
    assert {file.name for file in room.folder.iterdir()} == {"config.json", "tmp"}
    assert all((model / name).read_bytes() == b"the model's own" for name in names)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "consolidated.safetensors", "model.onnx", "dir"])
def test_a_model_folder_without_weights_starts_no_server_that_needs_some(
    model: Path, tmp_path: Path, name: str
) -> None:
    (model / name).write_bytes(b"{}")
    (model / "a.bin").mkdir()
    (model / "b.safetensors").symlink_to("nowhere")
    with (
        pytest.raises(Rejected, match=r"inference\.model-path\) has none that it reads .*; put them there, or choose"),
        Room(model, tmp_path / "room").with_weights(model),
    ):
        pass


def test_a_model_folder_that_cannot_be_read_is_named_with_what_to_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go, or be another user's, when its configuration has been read already."""
    (model / "a.bin").write_bytes(b"the model's own")
    room = Room(model, tmp_path / "room")
    room.close()
    with pytest.raises(Unavailable, match=r"cannot make .*room"), room.with_weights(model):
        pass
    room = Room(model, tmp_path / "room")
    unread = PermissionError(13, "Permission denied", str(model / "a.bin"))
    said = r"model \(inference\.model-path\) cannot be read: .*a\.bin.*; put it back, or let this user read all of it"
    with monkeypatch.context() as closed:
        closed.setattr(Path, "is_file", lambda *_: (_ for _ in ()).throw(unread))
        with pytest.raises(Rejected, match=said), room.with_weights(model):
            pass
        with pytest.raises(Rejected, match=said):
            Room(model, tmp_path / "room")
    room = Room(model, tmp_path / "room")
    shutil.rmtree(model)
    with pytest.raises(Rejected, match=r"cannot be read: .*No such file"), room.with_weights(model):
        pass


def test_an_adapter_lies_in_the_room_as_pefts_folder_until_it_is_dropped(model: Path, tmp_path: Path) -> None:
    room, lora = Room(model, tmp_path / "room"), Lora(2, 4, ("down_proj",))
    for name in ("one", "other"):
        room.keep(name, down(2), lora)
    tensors, read, base = read_peft_folder(room.adapter("one"))
    assert (tensors, read, base) == (down(2), lora, str(room.folder))
    for name in ("one", "one", "never"):
        room.drop(name)
    assert room.adapters() == {"other"} and [file.name for file in (room.folder / "adapters").iterdir()] == ["other"]


def test_nothing_in_the_room_ends_an_answer(model: Path, tmp_path: Path) -> None:
    """Transformers assumes an end where a configuration of some models names none: so it is said outright."""
    said = {"vocab_size": 9, "eos_token_id": [2, 3], "text_config": {"eos_token_id": 4, "vocab_size": 9}}
    (model / "config.json").write_bytes(msgspec.json.encode(said))
    (model / "generation_config.json").write_bytes(b'{"eos_token_id": 5}')
    room = Room(model, tmp_path / "room")
    found = msgspec.json.decode((room.folder / "config.json").read_bytes())
    nothing = {"eos_token_id": None, "vocab_size": 9}
    assert found == {**nothing, "text_config": nothing} and not (room.folder / "generation_config.json").exists()


def test_what_cannot_be_removed_is_out_of_the_way_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(model, tmp_path / "room")
    for name in ("one", "other"):
        room.keep(name, down(2), Lora(2, 4, ("down_proj",)))
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    for name in ("one", "other"):
        room.drop(name)
        assert not room.adapter(name).exists()
    assert room.adapters() == set()


@pytest.mark.parametrize("name", ["other", "never"])
def test_what_could_not_be_removed_is_tried_again_with_the_next_that_goes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    room = Room(model, tmp_path / "room")
    for each in ("one", "other", "stays"):
        room.keep(each, down(2), Lora(2, 4, ("down_proj",)))
    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", lambda *_, **__: None)
        room.drop("one")
    room.drop(name)
    left = {each.name for each in (room.folder / "adapters").iterdir()}
    assert left == {"other", "stays"} - {name}


def test_a_socket_fits_into_the_room_of_an_engine_with_the_longest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.reef_engine.sglang.room.SHARED", tmp_path)
    first, second = (place(tmp_path, "e" * 63 + each) for each in "12")
    assert first != second and len(first.name) + len("/dev/shm//tmp/tmpabcdefgh") <= 107


def test_no_room_is_said_in_bytes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(model, tmp_path / "room")
    with pytest.raises(TransferError, match=r"memory: no room for \d{15,} bytes in "):
        room.fit({"a": ("F32", (1 << 50,), 1 << 52)})


# -- sums


def ranks(*sums: dict[str, str]) -> list[dict[str, Any]]:
    return [{"checksums": each, "parallelism_info": [{"tp_rank": rank}]} for rank, each in enumerate(sums)]


def test_sums_are_compared_rank_by_rank_and_name_by_name() -> None:
    expected = [Sums(0, "x-64", {"a": "1", "b": "2"}), Sums(1, "x-64", {"a": "3", "b": "4"})]
    right = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert flaw(expected, ranks(*right)) == ""
    assert flaw(expected, list(reversed(ranks(*right)))) == ""
    assert flaw(expected, ranks(*reversed(right))) == "rank 0: parameter 'a' sums up to 3, expected 1"
    assert flaw(expected, ranks(right[0], {"a": "3", "b": "5"})) == "rank 1: parameter 'b' sums up to 5, expected 4"
    assert flaw(expected, ranks(right[0], {"a": "3"})) == "rank 1: parameter 'b' is only in the file"
    assert flaw(expected, ranks({**right[0], "c": "1"}, right[1])) == "rank 0: parameter 'c' is only in the server"
    assert flaw(expected, ranks(right[0])) == "the server spoke for ranks [0], expected 2"
    copy = [*ranks({**right[0], "a": "0"}), *ranks(*right)]
    assert flaw(expected, copy) == "the server spoke for ranks [0, 0, 1], expected 2"


# -- model folders


@pytest.mark.parametrize("config", [CONFIG, PolicyConfig(), PolicyConfig(heads=2, kv_heads=1, ffn=96, max_len=48)])
def test_a_policys_shape_is_read_back_as_it_was_written(tmp_path: Path, config: PolicyConfig) -> None:
    write_model_folder(tmp_path, config)
    assert read_policy_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mixtral"}, "Invalid enum value 'mixtral'"),
        ({"vocab_size": None}, "found no model that a policy can be"),
    ],
)
def test_a_model_that_no_policy_can_be_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_model_folder(tmp_path, CONFIG)
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), **change}))
    with pytest.raises(Rejected, match=said):
        read_policy_config(tmp_path)


def test_a_model_that_does_not_say_what_a_prompt_may_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"vocab_size": 16}')
    with pytest.raises(Rejected, match="max_position_embeddings"):
        Limits.of(tmp_path)
