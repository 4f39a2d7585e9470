"""The demo's policy: a small Llama or Qwen3 in plain torch, its sampler, and its parameters as bytes.

Knows: tensors, under the names of Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM, to swap weights with them.
Must not know: rewards, optimizers, files, or who loads and reads the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reef_bus.backends import Piece, Stop, never
from reef_bus.errors import ContractError, Rejected

RMS_EPS = 1e-6
GREEDY_BELOW = 1e-5  # logits divided by less than this leave float32
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a policy. The defaults have 76,096 parameters (304,384 bytes) and learn `digit` in seconds. With
    `qk_norm` each head's queries and keys are normalised before they are rotated, which makes a Llama a Qwen3."""

    vocab: int = 16
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    max_len: int = 32
    init_std: float = 0.05
    rope_theta: float = 10_000.0
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise Rejected(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads} do not fit: hidden must be "
                "a multiple of twice the heads, and heads a multiple of kv_heads"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Cache:
    """Keys and values of the positions seen so far, one pair per layer, for `capacity` positions."""

    def __init__(self, config: PolicyConfig, batch: int, capacity: int) -> None:
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        self.pairs = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.layers)]
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new positions; all of its positions come back. `length` moves once, after all layers."""
        end = self.length + keys.shape[2]
        for kept, new in zip(self.pairs[layer], (keys, values), strict=True):
            kept[:, :, self.length : end] = new
        return self.pairs[layer][0][:, :, :end], self.pairs[layer][1][:, :, :end]


class Weight(nn.Module):
    """One matrix or vector, NaN until it is loaded. torch's own layers would draw from the global generator here."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, float("nan")))


class Linear(nn.Linear):
    """torch's own for whoever looks for one, as PEFT does; but for how it is made, as `Weight`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.full((outputs, inputs), float("nan")))
        self.register_parameter("bias", None)


class Embedding(Weight):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, RMS_EPS)


class Attention(nn.Module):
    """Causal grouped-query attention. With a cache it takes the whole prompt first, then one token at a time."""

    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        narrow = config.kv_heads * config.head_dim
        self.q_proj, self.o_proj = Linear(config.hidden, config.hidden), Linear(config.hidden, config.hidden)
        self.k_proj, self.v_proj = Linear(config.hidden, narrow), Linear(config.hidden, narrow)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None) -> Tensor:
        queries, keys, values = (self._heads(into(x)) for into in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        if cache is not None:
            keys, values = cache.extend(self.layer, keys, values)
        causal = x.shape[1] > 1  # a single new token may see every cached position
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(config.hidden, config.ffn), Linear(config.hidden, config.ffn)
        self.down_proj = Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(config.hidden), Attention(config, layer)
        self.post_attention_layernorm, self.mlp = RMSNorm(config.hidden), MLP(config)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything below the output head; exists because the public names start with `model.`."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden)

    def forward(self, ids: Tensor, angles: Tensor, cache: Cache | None) -> Tensor:
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, angles, cache)
        out: Tensor = self.norm(x)
        return out


class Policy(nn.Module):
    """A Llama-shaped language model in float32. Every parameter is NaN until somebody fills it."""

    angles: Tensor

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.model, self.lm_head = Trunk(config), Linear(config.hidden, config.vocab)
        self.register_buffer("angles", rope_angles(config), persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, T, vocab] of ids [B, T]; with a cache, T positions that follow those already in it."""
        start = cache.length if cache is not None else 0
        hidden = self.model(ids, self.angles[:, start : start + ids.shape[1]], cache)
        if cache is not None:
            cache.length += ids.shape[1]
        logits: Tensor = self.lm_head(hidden)
        return logits


def rope_angles(config: PolicyConfig) -> Tensor:
    """Cosines and sines [2, max_len, head_dim] of rotary embeddings (Su et al. 2021, the half-split layout)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_len, dtype=torch.float32), config.rope_theta**-exponents)
    both = torch.cat((angles, angles), -1)
    return torch.stack((both.cos(), both.sin()))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * angles[0] + torch.cat((-right, left), -1) * angles[1]


def new_policy(config: PolicyConfig, seed: int) -> Policy:
    """A base model: matrices near N(0, init_std), norms one. The seed alone decides the bytes; no global generator."""
    policy, generator = Policy(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            is_norm = parameter.dim() == 1
            parameter.copy_(torch.ones(()) if is_norm else _bell(parameter, config, generator))
    return policy


def _bell(like: Tensor, config: PolicyConfig, generator: torch.Generator) -> Tensor:
    """Sum of twelve uniform integers: mean 0, variance 1, nearly normal.

    `normal_` picks its formula by the CPU's vector width, so its bytes may differ between machines; these do not.
    """
    sums = torch.randint(0, 65_536, (12, *like.shape), generator=generator).sum(0)
    return (sums.double() - 12 * 32_767.5) / 65_536 * config.init_std


def fill(policy: Policy, tensors: Mapping[str, Tensor]) -> Policy:
    """Copy `tensors` over the parameters of the same names; every parameter must be there."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(tensors[name])
    return policy


def sample(
    policy: Policy, prompts: Tensor, max_tokens: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Continue prompts [B, T] by exactly `max_tokens`: ids and their logprobs, both [B, max_tokens]."""
    draws = torch.rand(prompts.shape[0], max_tokens, dtype=torch.float64, generator=generator)
    return sample_with(policy, prompts, draws, temperature)


def sample_with(policy: Policy, prompts: Tensor, draws: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Like `sample`, with the uniform numbers [B, max_tokens] given: each row's randomness is then its own.

    Logprobs (natural) are those of the distribution that was sampled from. Temperature 0 is greedy: all of its
    probability lies on the most likely token, so its logprobs are 0.
    """
    sampling = Sampling(prompts, draws, temperature)
    sampling.go_on(policy, never)
    return sampling.sampled()


class Sampling:
    """Equally long prompts on their way, as in `sample_with`; all done as soon as each has sampled one of `stop_ids`.
    Between two tokens it may stop, and go on later with the cache that it has, and with whatever policy it is then
    given."""

    def __init__(self, prompts: Tensor, draws: Tensor, temperature: float, stop_ids: Sequence[int] = ()) -> None:
        self.prompts, self.draws, self.temperature = prompts, draws, temperature
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.cache: Cache | None = None  # from the first token to the last

    def done(self) -> bool:
        return len(self.tokens) == self.draws.shape[1] or bool(self.ended.all())

    def go_on(self, policy: Policy, stop: Stop) -> None:
        """Until it is done, or `stop` says so."""
        with torch.inference_mode():
            while not self.done() and not stop():
                self._step(policy)
        if self.done():
            self.cache = None

    def _step(self, policy: Policy) -> None:
        if self.cache is None:
            rows, length = self.prompts.shape
            self.cache = Cache(policy.config, rows, length + self.draws.shape[1])
        logits = policy(self.tokens[-1] if self.tokens else self.prompts, self.cache)[:, -1]
        table = _distribution(logits, self.temperature)
        chosen = _choose(table, self.draws[:, len(self.tokens)])
        self.tokens.append(chosen)
        self.logprobs.append(table.gather(1, chosen))
        self.ended |= torch.isin(chosen[:, 0], self.stop_ids)

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Ids and logprobs so far, both [B, tokens]."""
        rows = self.prompts.shape[0]
        none = torch.empty(rows, 0, dtype=torch.long), torch.empty(rows, 0)
        return torch.cat([none[0], *self.tokens], 1), torch.cat([none[1], *self.logprobs], 1)


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    if temperature >= GREEDY_BELOW:
        return F.log_softmax(logits / temperature, -1)
    best = logits.argmax(-1, keepdim=True)
    # Adding 0·logits keeps NaN visible: greedy answers of unloaded weights must not look certain.
    return torch.full_like(logits, -torch.inf).scatter(1, best, 0.0 * logits.gather(1, best))


def _choose(table: Tensor, draw: Tensor) -> Tensor:
    """Inverse transform sampling, in double precision so that rounding cannot reach tokens of probability zero."""
    mass = table.double().exp().cumsum(-1)
    threshold = draw.unsqueeze(1) * mass[:, -1:]
    return torch.searchsorted(mass, threshold, right=True).clamp_(max=table.shape[1] - 1)


def pieces(tensors: Mapping[str, Tensor], writable: bool = False) -> dict[str, Piece]:
    """Each tensor's own memory as bytes, no copy; writing to a writable piece writes the tensor."""
    return {name: _piece(name, tensor, writable) for name, tensor in tensors.items()}


def _piece(name: str, tensor: Tensor, writable: bool) -> Piece:
    if not tensor.is_contiguous() or tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise ContractError(
            f"{name}: found {tensor.dtype} on {tensor.device}, strides {tensor.stride()}; "
            "expected a contiguous floating-point tensor in CPU memory"
        )
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return Piece(DTYPES[tensor.dtype], tuple(tensor.shape), data if writable else data.toreadonly())
