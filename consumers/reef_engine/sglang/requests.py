"""What we say to an SGLang 0.5.23 server: one function per route, named like it, that gives the body; and what we read.

Knows: the server's field names, as plain JSON values; tests/sglang holds them against the installed package.
Must not know: HTTP, when a request is due, or sglang itself, which may not be installed where this is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from reef_bus.events import Lora

Body = dict[str, Any]

SEEDS = 2**63
"""The server takes a seed below this; ours may be any integer."""

READ: Mapping[str, tuple[str, ...]] = {
    "abort_request": (),
    "begin_weight_update": ("success", "message"),
    "continue_generation": ("status",),
    "destroy_weights_update_group": ("success", "message"),
    "end_weight_update": ("success", "message"),
    "flush_cache": (),
    "generate": ("output_ids", "meta_info"),
    "init_weights_update_group": ("success", "message"),
    "load_lora_adapter": ("error_message",),
    "load_lora_adapter_from_tensors": ("error_message",),
    "model_info": ("model_path", "model_type", "weight_version"),
    "pause_generation": ("status",),
    "release_memory_occupation": (),
    "resume_memory_occupation": (),
    "unload_lora_adapter": ("error_message",),
    "update_weight_version": ("success", "message", "new_version"),
    "update_weights_from_disk": ("success", "message"),
    "update_weights_from_distributed": ("success", "message"),
    "update_weights_from_tensor": ("success", "message"),
    "weights_checker": ("success", "message", "ranks"),
}
"""By route: the fields of its answer that we read. Where there are none, the HTTP status says all."""

MODEL = ("id", "parent")
"""One of `v1/models`' `data`: an adapter has the base model as its parent."""

META_INFO = (
    "finish_reason",
    "input_token_logprobs",
    "output_token_logprobs",
    "weight_version",
    "weight_versions",
    "num_retractions",
)
"""What we read of `generate`'s `meta_info`. A logprob is [logprob, id, text or null]; a finish reason has a `type`."""

SPAN = ("version", "start", "end")
"""One of `weight_versions`: which weights made the tokens from `start` to `end`."""

RANK = ("checksums", "per_gpu_checksum", "parallelism_info")
"""One of `weights_checker`'s `ranks`."""


# Generation.


def generate(
    ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
    rid: str | None = None,
    adapter: str | None = None,
    stop_ids: Sequence[int] = (),
    stream: bool = False,
) -> Body:
    """`max_tokens` tokens after `ids`, or fewer up to one of `stop_ids`, each with its logprob; `adapter` is a loaded
    one's name. Both together may be --context-length less two: of more, the server gives fewer, and calls that
    "length", too."""
    body: Body = {
        "input_ids": list(ids),
        "sampling_params": sampling_params(max_tokens, temperature, seed, stop_ids),
        "return_logprob": True,
        "stream": stream,
    }
    optional = {"rid": rid, "lora_path": adapter}
    return body | {name: value for name, value in optional.items() if value is not None}


def probe(ids: Sequence[int], *, adapter: str) -> Body:
    """What it thinks of each of these tokens but the first; none of them is taken from the prefix cache."""
    return generate(ids, max_tokens=1, temperature=1.0, adapter=adapter) | {"logprob_start_len": 0}


NO_ADAPTER = ("Got LoRA adapter that has never been loaded:", "Failed to implicitly load LoRA adapter")
"""How the server refuses a request for an adapter that it has not; the adapter's name follows."""

INCOMPLETE = "has an incomplete unload"
"""And then still holds it, in one rank at least: it has to be told once more."""


def sampling_params(max_tokens: int, temperature: float, seed: int | None = None, stop_ids: Sequence[int] = ()) -> Body:
    """The whole distribution, said outright: what is left out, a server's --preferred-sampling-params may fill in. A
    `seed` counts only under --enable-deterministic-inference; any other server takes it and draws as it likes. With any
    `stop_ids` it also ends at what the model's folder calls an end; without, at nothing."""
    params: Body = {"max_new_tokens": max_tokens, "temperature": temperature, "ignore_eos": not stop_ids}
    params |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": list(stop_ids)}
    return params if seed is None else params | {"sampling_seed": seed % SEEDS}


def abort_request(rid: str) -> Body:
    """One request; 200 whether there was such a one or not."""
    return {"rid": rid}


def abort_every_request() -> Body:
    """The body of `abort_request` that means all."""
    return {"abort_all": True}


def pause_generation(mode: Literal["abort", "retract", "in_place"]) -> Body:
    """End what is in hand, start it over later, or go on with it later, KV cache included."""
    return {"mode": mode}


def continue_generation() -> Body:
    return {}


def flush_cache(timeout_s: float = 0.0) -> Body:
    """The query, for this route has no body: how long the server may wait until nothing runs any more."""
    return {"timeout": timeout_s}


# Weights. `flush` drops what was computed with the old ones; the server cannot do that while requests are in hand.


def begin_weight_update() -> Body:
    """Since 0.5.23 `update_weights_from_tensor` is refused outside of a session."""
    return {}


def end_weight_update() -> Body:
    return {}


def init_weights_update_group(address: str, port: int, *, offset: int, size: int, group: str, backend: str) -> Body:
    """`offset`: the rank of the server's first process in a group of `size`."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": offset,
        "world_size": size,
        "group_name": group,
        "backend": backend,
    }


def destroy_weights_update_group(group: str) -> Body:
    return {"group_name": group}


def update_weights_from_distributed(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    *,
    group: str,
    flush: bool,
    version: str | None = None,
    format: str | None = None,
) -> Body:
    """`tensors`: by name, in the order of the broadcasts, torch's name of the dtype ("float32") and the shape."""
    return {
        "names": list(tensors),
        "dtypes": [dtype for dtype, _ in tensors.values()],
        "shapes": [list(shape) for _, shape in tensors.values()],
        "group_name": group,
        **_weights(flush, version, format),
    }


def update_weights_from_tensor(
    serialized: Sequence[str], *, flush: bool, version: str | None = None, format: str | None = None
) -> Body:
    """`serialized`: by tensor-parallel rank, base64 of what SGLang unpickles. Garbage ends the server's process."""
    return {"serialized_named_tensors": list(serialized), **_weights(flush, version, format)}


def update_weights_from_disk(
    folder: str, *, flush: bool, version: str | None = None, format: str | None = None
) -> Body:
    """`folder`: a model folder that the server sees; its /model_info.model_path is this one afterwards."""
    return {"model_path": folder, **_weights(flush, version, format)}


def _weights(flush: bool, version: str | None, format: str | None) -> Body:
    optional = {"weight_version": version, "load_format": format}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"flush_cache": flush, "abort_all_requests": False, **given}


def update_weight_version(version: str) -> Body:
    """The label alone. Without the second field the server aborts everything."""
    return {"new_version": version, "abort_all_requests": False}


def weights_checker(action: Literal["checksum", "snapshot", "reset_tensors", "compare"]) -> Body:
    return {"action": action}


# Adapters and memory.


def load_lora_adapter(name: str, folder: str) -> Body:
    """`folder`: in PEFT's layout, and seen by the server. One that was started without weights (--load-format dummy)
    refuses."""
    return {"lora_name": name, "lora_path": folder}


def load_lora_adapter_from_tensors(name: str, lora: Lora, serialized: Sequence[str], sums: Mapping[str, str]) -> Body:
    """`serialized`: by tensor-parallel rank, base64 of a pickled dict. `sums`: by tensor, sha256 in hex. Each rank
    compares them with what it has received, and a difference ends the server's process."""
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    return {
        "lora_name": name,
        "config_dict": config,
        "serialized_named_tensors": list(serialized),
        "expected_checksums": dict(sums),
    }


def unload_lora_adapter(name: str) -> Body:
    """No fence for one that was loaded from a folder: a request that names it later loads it again from there."""
    return {"lora_name": name}


def release_memory_occupation(*tags: str) -> Body:
    """Everything, if no tag is given."""
    return {"tags": list(tags) or None}


def resume_memory_occupation(*tags: str) -> Body:
    return {"tags": list(tags) or None}
