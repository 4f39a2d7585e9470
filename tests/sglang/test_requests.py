"""Our requests against the SGLang that is installed: its own routes take them, its own structs name every field.

An upgrade that renames, drops or retypes a field that we send or read turns a row red.
Knows: sglang's HTTP application and structs. Must not know: a running server (other tests here start one).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import typing
from collections.abc import AsyncIterator, Callable
from importlib.metadata import requires, version
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from consumers.reef_engine.sglang import requests
from consumers.reef_engine.sglang.requests import META_INFO, MODEL, RANK, READ, SPAN, Body
from reef_bus.events import Lora

pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # their routes use it

TENSORS = {"lm_head.weight": ("float32", (16, 64)), "model.norm.weight": ("float32", (64,))}
LORA = Lora(8, 16, ("q_proj", "v_proj"))
WHOLE = {"flush": True, "version": "w:7", "format": "flattened_bucket"}

# Each route with every body that we send to it: the longest, and others that differ in kind.
ROUTES: dict[str, list[Body]] = {
    "abort_request": [requests.abort_request("r1"), requests.abort_every_request()],
    "begin_weight_update": [requests.begin_weight_update()],
    "continue_generation": [requests.continue_generation()],
    "destroy_weights_update_group": [requests.destroy_weights_update_group("g")],
    "end_weight_update": [requests.end_weight_update()],
    "generate": [
        requests.generate([11, 3, 10], max_tokens=4, temperature=0.5, seed=-7, rid="r1", adapter="a", stream=False),
        requests.generate((11,), max_tokens=4, temperature=1.0, stop_ids=(3, 5)),
        requests.generate((11,), max_tokens=1, temperature=0.0),
        requests.probe([11, 3, 10], adapter="a"),
    ],
    "init_weights_update_group": [
        requests.init_weights_update_group("127.0.0.1", 29500, offset=1, size=2, group="g", backend="gloo")
    ],
    "load_lora_adapter": [requests.load_lora_adapter("a", "/adapters/a")],
    "load_lora_adapter_from_tensors": [requests.load_lora_adapter_from_tensors("a", LORA, ["AAEC"], {"x": "00"})],
    "pause_generation": [requests.pause_generation(mode) for mode in ("abort", "retract", "in_place")],
    "release_memory_occupation": [
        requests.release_memory_occupation(),
        requests.release_memory_occupation("weights", "kv_cache", "cuda_graph"),
    ],
    "resume_memory_occupation": [
        requests.resume_memory_occupation(),
        requests.resume_memory_occupation("weights", "kv_cache", "cuda_graph"),
    ],
    "unload_lora_adapter": [requests.unload_lora_adapter("a")],
    "update_weight_version": [requests.update_weight_version("w:7")],
    "update_weights_from_disk": [requests.update_weights_from_disk("/models/7", **WHOLE)],
    "update_weights_from_distributed": [requests.update_weights_from_distributed(TENSORS, group="g", **WHOLE)],
    "update_weights_from_tensor": [requests.update_weights_from_tensor(["AAEC"], **WHOLE)],
    "weights_checker": [
        requests.weights_checker(action) for action in ("checksum", "snapshot", "reset_tensors", "compare")
    ],
}
CASES = [
    pytest.param(route, body, id=f"{route}-{n}") for route, bodies in ROUTES.items() for n, body in enumerate(bodies)
]

BASE64 = {"serialized_named_tensors": [b"\x00\x01\x02"]}
"""What travels as base64, as the server reads it: the three bytes of "AAEC"."""


@pytest.fixture(scope="module")
def server(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("sglang.srt.entrypoints.http_server")


@pytest.fixture(scope="module")
def structs(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("sglang.srt.managers.io_struct")


@pytest.fixture(scope="module")
def sampling(imported: Callable[[str], ModuleType]) -> Any:
    return imported("sglang.srt.sampling.sampling_params").SamplingParams


def test_the_installed_versions_are_those_that_the_extras_name() -> None:
    named = {line.partition(";")[0] for line in requires("reef-bus") or () if line.startswith("sglang")}
    assert named == {f"{each}=={version(each)}" for each in ("sglang", "sglang-router")}


# What we send.


def taken_by(server: ModuleType, route: str) -> Any:
    """The type of the body that the application's own route declares."""
    (endpoint,) = [
        r.endpoint for r in server.app.routes if getattr(r, "path", "") == f"/{route}" and "POST" in r.methods
    ]
    declared = inspect.signature(endpoint).parameters["obj"].annotation
    while not inspect.isclass(declared):  # Annotated[Optional[X], Body()] is X
        declared = typing.get_args(declared)[0]
    return declared


def field_names(kind: Any) -> set[str]:
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    return {field.name for field in fields}


def decoded(kind: Any, body: Body) -> Any:
    """As FastAPI decodes it, by the schema that SGLang gives the struct; but strictly, and no field may be unknown."""
    from pydantic import TypeAdapter

    unknown = body.keys() - field_names(kind)
    assert not unknown, f"{kind.__name__} has no {sorted(unknown)}"
    return TypeAdapter(kind).validate_json(json.dumps(body), strict=True)


def test_every_route_that_we_read_from_is_sent_to_except_two_without_a_body() -> None:
    assert READ.keys() - ROUTES.keys() == {"flush_cache", "model_info"}
    assert ROUTES.keys() <= READ.keys()
    assert all(callable(getattr(requests, route)) for route in ROUTES)


@pytest.mark.parametrize(("route", "body"), CASES)
def test_the_route_has_a_struct_with_every_field_that_we_send(server: ModuleType, route: str, body: Body) -> None:
    found = decoded(taken_by(server, route), body)
    for name, value in body.items():
        assert getattr(found, name) == BASE64.get(name, value)


@pytest.mark.parametrize(
    ("route", "wrong"),
    [
        ("generate", {"input_ids": [11], "max_new_tokens": 4}),
        ("generate", {"input_ids": ["11"]}),
        ("pause_generation", {"mode": "drain"}),
        ("pause_generation", {"how": "retract"}),
        ("update_weight_version", {}),
        ("update_weights_from_disk", {"model_path": "m", "flush_cache": "no"}),
        ("update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [16]}),
        ("load_lora_adapter_from_tensors", {"lora_name": "a", "config_dict": {}}),
    ],
)
def test_the_check_refuses_what_is_unknown_missing_or_of_another_type(
    server: ModuleType, route: str, wrong: Body
) -> None:
    with pytest.raises((AssertionError, ValueError)):
        decoded(taken_by(server, route), wrong)


def test_generate_also_passes_the_schema_that_gates_the_route(imported: Callable[[str], ModuleType]) -> None:
    contract = imported("sglang.srt.entrypoints.api_contract")
    for body in ROUTES["generate"]:
        assert contract.generate_contract_error(body) is None
    assert contract.generate_contract_error({"sampling_params": {"max_new_tokens": "four"}}) is not None


@pytest.mark.parametrize("body", [body["sampling_params"] for body in ROUTES["generate"]])
def test_sampling_parameters_are_fields_of_their_own_class_and_valid(sampling: Any, body: Body) -> None:
    """It checks types only when it is decoded, which the scheduler's process does: so here, too."""
    params = sampling(**body)
    params.verify(16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=sampling) == params
    stops = set(body["stop_token_ids"])
    assert (params.max_new_tokens, params.stop_token_ids or set()) == (body["max_new_tokens"], stops)
    assert params.ignore_eos == (not stops)


def test_a_temperature_of_zero_is_greedy_and_any_other_samples_from_all_tokens(sampling: Any) -> None:
    assert sampling(**requests.sampling_params(4, 0.0)).top_k == 1
    found = sampling(**requests.sampling_params(4, 0.5))
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 1.0, sampling(top_k=-1).top_k, 0.0)
    assert found.top_k > 10**6


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**70), 2**70 + 1])
def test_every_seed_becomes_one_that_the_server_takes(sampling: Any, seed: int) -> None:
    params = sampling(**requests.sampling_params(1, 1.0, seed))
    params.verify(16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=sampling).sampling_seed == params.sampling_seed


def test_a_sampling_parameter_that_is_unknown_or_impossible_is_refused(sampling: Any) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        sampling(max_tokens=4)
    with pytest.raises(ValueError, match="temperature"):
        sampling(temperature=-1.0).verify(16)


# What comes back.


class Manager:
    """Stands behind the application's routes, answers as its own does, and keeps what it was handed."""

    def __init__(self, structs: ModuleType) -> None:
        self.handed: list[Any] = []
        self.lora = structs.LoRAUpdateOutput(success=True, error_message="", loaded_adapters={"a": "/adapters/a"})
        self.flushed = structs.FlushCacheReqOutput(success=True)
        self.ranks = [{"checksums": {}, "per_gpu_checksum": "", "parallelism_info": []}]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def answer(obj: Any = None, request: Any = None, **named: Any) -> Any:
            self.handed.append(named if obj is None else obj)
            return self._answer(name)

        return answer

    def abort_request(self, rid: str, abort_all: bool) -> None:
        self.handed.append(SimpleNamespace(rid=rid, abort_all=abort_all))

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Body]:
        self.handed.append(obj)
        yield {"output_ids": [3], "meta_info": {}}

    def _answer(self, name: str) -> Any:
        if "lora_adapter" in name:
            return self.lora
        special = {
            "check_weights": (True, "", self.ranks, None),
            "flush_cache": self.flushed,
            "update_weights_from_disk": (True, "", 0),
        }
        return special.get(name, (True, ""))


@pytest.fixture
def manager(server: ModuleType, structs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Manager:
    manager = Manager(structs)
    monkeypatch.setattr(server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    return manager


@pytest.fixture
def http(server: ModuleType, imported: Callable[[str], ModuleType]) -> Any:
    return imported("starlette.testclient").TestClient(server.app)


@pytest.mark.parametrize(("route", "body"), CASES)
def test_the_route_hands_on_what_we_sent_and_answers_with_what_we_read(
    http: Any, manager: Manager, route: str, body: Body
) -> None:
    answer = http.post(f"/{route}", json=body)
    assert answer.status_code == 200, answer.text
    handed = manager.handed[0]
    assert {name: getattr(handed, name) for name in body} == body | {n: BASE64[n] for n in body.keys() & BASE64.keys()}
    assert set(READ[route]) <= (answer.json() or {}).keys() if answer.content else not READ[route]


def test_flush_cache_takes_its_timeout_from_the_query(http: Any, manager: Manager) -> None:
    assert http.post("/flush_cache", params=requests.flush_cache(2.5)).status_code == 200
    assert manager.handed == [{"timeout_s": 2.5}]


def test_a_failure_is_a_400_with_the_same_fields(http: Any, manager: Manager, structs: ModuleType) -> None:
    manager.lora = structs.LoRAUpdateOutput(success=False, error_message="no room")
    answer = http.post("/load_lora_adapter_from_tensors", json=ROUTES["load_lora_adapter_from_tensors"][0])
    assert (answer.status_code, answer.json()["error_message"]) == (400, "no room")
    manager.flushed = structs.FlushCacheReqOutput(success=False, message="")
    assert http.post("/flush_cache", params=requests.flush_cache()).status_code == 400


def test_spans_and_checksums_have_the_fields_that_we_read(
    structs: ModuleType, imported: Callable[[str], ModuleType]
) -> None:
    assert set(SPAN) <= field_names(imported("sglang.srt.utils.weight_versions").WeightVersionSpan)
    assert set(RANK) <= field_names(structs.ChecksumInfo)


def test_the_servers_list_of_models_says_which_are_adapters(imported: Callable[[str], ModuleType]) -> None:
    card = imported("sglang.srt.entrypoints.openai.protocol").ModelCard
    assert set(MODEL) <= card.model_fields.keys() and card.model_fields["parent"].default is None


def test_the_names_of_meta_info_and_model_info_are_still_written_where_answers_are_made(
    server: ModuleType, imported: Callable[[str], ModuleType]
) -> None:
    """Their dicts are built inside the server's own processes; a running server is asked elsewhere."""
    makers = ("managers.tokenizer_manager", "utils.weight_versions", "managers.schedule_batch")
    assert {*META_INFO, *READ["generate"]} <= set().union(*(words(imported(f"sglang.srt.{name}")) for name in makers))
    assert set(READ["model_info"]) <= words(server.model_info)


def words(source: Any) -> set[str]:
    constants = (node for node in ast.walk(ast.parse(inspect.getsource(source))) if isinstance(node, ast.Constant))
    return {node.value for node in constants if isinstance(node.value, str)}
