"""Operators of a model with their parameter counts. Operators are the units in which snapshots capture state.

An operator is one routed expert, one layer's gate (router), all other parameters of a layer, the embedding, or the
head. The parameter counts equal those of Megatron-Core's GPTModel. A component is one tensor of a parameter's state,
e.g. the master weight. ``StateShard.full`` lists the components of a parameter's whole state, and ``StateShard.frozen``
those that suffice to compute with the parameter without updating it. A rank captures one range of elements of each of
its parameters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ft.config.model import ModelConfig

Kind = Literal["embedding", "non_expert", "gate", "expert", "head"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OperatorId:
    """Identity of an operator. ``layer`` is Megatron's layer number, counted from 1; it is 0 for the embedding and
    ``num_layers + 1`` for the head."""

    layer: int
    kind: Kind
    expert: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}" + ("" if self.expert is None else f".{self.expert}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator with two counts: parameters that are split over TP ranks, and parameters that every TP rank has."""

    id: OperatorId
    num_split_parameters: int
    num_repeated_parameters: int

    @property
    def num_parameters(self) -> int:
        """Number of all parameters of the operator."""
        return self.num_split_parameters + self.num_repeated_parameters


def is_moe_layer(model: ModelConfig, layer: int) -> bool:
    """Return whether layer number ``layer``, counted from 1, is an MoE layer."""
    if model.num_moe_experts is None or layer <= model.moe_first_dense_layers:
        return False
    return layer % model.moe_layer_freq == 0


def moe_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of all MoE layers, counted from 1."""
    return tuple(layer for layer in range(1, model.num_layers + 1) if is_moe_layer(model, layer))


def padded_vocab_size(model: ModelConfig, tokenizer_vocab_size: int | None = None) -> int:
    """Return the number of embedding rows: the vocabulary size rounded up to ``make_vocab_size_divisible_by``."""
    size = model.vocab_size if model.vocab_size is not None else tokenizer_vocab_size
    assert size is not None, "model.vocab_size is null and no tokenizer was given"
    # Independent of TP, unlike Megatron's own padding, so that checkpoints fit every layout.
    multiple = model.make_vocab_size_divisible_by
    return -(-size // multiple) * multiple


def head_channels(model: ModelConfig) -> int:
    """Return the number of channels of one attention head."""
    return model.kv_channels if model.kv_channels is not None else model.hidden_size // model.num_attention_heads


def operators_of(model: ModelConfig, tokenizer_vocab_size: int | None = None) -> tuple[Operator, ...]:
    """List all operators of a model from the embedding to the head, in layer order.

    If ``model.vocab_size`` is null, the vocabulary has ``tokenizer_vocab_size`` entries.
    """
    vocab = padded_vocab_size(model, tokenizer_vocab_size)
    operators = [_embedding(model, vocab)]
    for layer in range(1, model.num_layers + 1):
        operators.extend(_layer(model, layer))
    return (*operators, _head(model, vocab))


def num_parameters(operators: tuple[Operator, ...]) -> int:
    """Return the total number of parameters of ``operators``."""
    return sum(operator.num_parameters for operator in operators)


def num_active_parameters(model: ModelConfig, operators: tuple[Operator, ...]) -> int:
    """Return the number of parameters used for one token. Of each MoE layer, only the chosen experts count."""
    topk = model.moe_router_topk
    # All experts of a layer have equal size, so the first ``topk`` experts stand for the chosen ones.
    chosen = (o for o in operators if o.id.expert is None or o.id.expert < topk)
    return sum(operator.num_parameters for operator in chosen)


def _embedding(model: ModelConfig, vocab: int) -> Operator:
    rows = model.max_position_embeddings or model.seq_length
    positions = rows * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
    return Operator(
        id=OperatorId(layer=0, kind="embedding"),
        num_split_parameters=vocab * model.hidden_size,
        num_repeated_parameters=positions,
    )


def _head(model: ModelConfig, vocab: int) -> Operator:
    return Operator(
        id=OperatorId(layer=model.num_layers + 1, kind="head"),
        # Tied weights belong to the embedding and are counted there.
        num_split_parameters=vocab * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
        num_repeated_parameters=_norm(model, model.hidden_size),
    )


def _layer(model: ModelConfig, layer: int) -> list[Operator]:
    split, repeated = _latent_attention(model) if model.multi_latent_attention else _attention(model)
    repeated += 2 * _norm(model, model.hidden_size)
    if not is_moe_layer(model, layer):
        mlp_split, mlp_repeated = _mlp(model, model.ffn_hidden_size)
        return [_operator(layer, "non_expert", split + mlp_split, repeated + mlp_repeated)]
    shared_split, shared_repeated = _shared_experts(model)
    return [
        _operator(layer, "non_expert", split + shared_split, repeated + shared_repeated),
        _operator(layer, "gate", 0, _gate(model)),
        *_experts(model, layer),
    ]


def _experts(model: ModelConfig, layer: int) -> list[Operator]:
    assert model.num_moe_experts is not None, f"experts of layer {layer} were requested, but it is dense"
    split, repeated = _mlp(model, model.moe_ffn_hidden_size or model.ffn_hidden_size)
    return [_operator(layer, "expert", split, repeated, expert) for expert in range(model.num_moe_experts)]


def _operator(layer: int, kind: Kind, split: int, repeated: int, expert: int | None = None) -> Operator:
    identity = OperatorId(layer=layer, kind=kind, expert=expert)
    return Operator(id=identity, num_split_parameters=split, num_repeated_parameters=repeated)


def _norm(model: ModelConfig, width: int) -> int:
    return width * (2 if model.normalization == "LayerNorm" else 1)


def _attention(model: ModelConfig) -> tuple[int, int]:
    hidden, channels = model.hidden_size, head_channels(model)
    queries = model.num_attention_heads * channels
    keys = (model.num_query_groups or model.num_attention_heads) * channels
    qkv_bias = queries + 2 * keys if model.add_bias_linear or model.add_qkv_bias else 0
    split = hidden * (queries + 2 * keys) + qkv_bias + queries * hidden
    # The bias of a row-parallel layer is added after the sum over TP ranks, so each TP rank has the whole bias.
    repeated = hidden if model.add_bias_linear else 0
    return split, repeated + (2 * _norm(model, channels) if model.qk_layernorm else 0)


def _latent_attention(model: ModelConfig) -> tuple[int, int]:
    """Return how many parameters of latent attention are split over TP ranks, and how many every rank has."""
    hidden, heads, query_width = model.hidden_size, model.num_attention_heads, model.qk_head_dim
    query_width += model.qk_pos_emb_head_dim
    split = (model.q_lora_rank or hidden) * heads * query_width
    split += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) + heads * model.v_head_dim * hidden
    # Every head needs the whole output of the down projections, so Megatron repeats them on all TP ranks.
    repeated = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + hidden * (model.q_lora_rank or 0)
    repeated += hidden if model.add_bias_linear else 0
    norms = _norm(model, model.kv_lora_rank) + (_norm(model, model.q_lora_rank) if model.q_lora_rank else 0)
    return split, repeated + (norms if model.qk_layernorm else 0)


def _mlp(model: ModelConfig, width: int) -> tuple[int, int]:
    inner = 2 * width if model.gated_linear_unit else width
    bias = model.add_bias_linear
    return model.hidden_size * (inner + width) + (inner if bias else 0), model.hidden_size if bias else 0


def _shared_experts(model: ModelConfig) -> tuple[int, int]:
    if model.moe_shared_expert_intermediate_size is None:
        return 0, 0
    split, repeated = _mlp(model, model.moe_shared_expert_intermediate_size)
    return split, repeated + (model.hidden_size if model.moe_shared_expert_gate else 0)


def _gate(model: ModelConfig) -> int:
    assert model.num_moe_experts is not None, "the gate of a dense layer was requested; only MoE layers have one"
    return model.num_moe_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))


_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
SCALE_BLOCK_ELEMENTS = 64
"""Number of elements in a block of a flattened parameter with quantized state. The elements of a block share one scale.
A captured range of such a parameter begins at a multiple of this number, so that no range divides a block."""

_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One tensor of a parameter's state, such as ``weight``, ``master``, ``exp_avg``, ``exp_avg_sq`` or ``step``."""

    name: str
    dtype: str
    """Name of the dtype in torch, e.g. ``float32``."""
    item_bytes: int
    """Bytes of one value."""
    per_element: bool = True
    """Whether the component has values per element or per block. Otherwise it has one value for the whole shard, which
    every captured part of the shard repeats."""
    per_block: bool = False
    """Whether the component contains scales of quantized state: one value for each block of ``SCALE_BLOCK_ELEMENTS``
    elements. The last block may have fewer elements. The name of such a component ends with ``_scales``."""

    def num_values(self, num_elements: int) -> int:
        """Return how many values the component has for ``num_elements`` consecutive elements of a parameter. If it has
        values per block, the first of these elements must be the first of a block."""
        if not self.per_element:
            return int(num_elements > 0)
        return -(-num_elements // SCALE_BLOCK_ELEMENTS) if self.per_block else num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """Range of elements of one parameter whose state one rank captures."""

    operator: OperatorId
    parameter: str
    """Name of the parameter, equal on all ranks."""
    tensor_part: int
    """Index of the tensor-parallel part of the parameter; 0 if the parameter is not split."""
    start: int
    """Index of the first captured element in the flattened tensor-parallel part."""
    stop: int
    """Index after the last captured element."""
    full: tuple[Component, ...]
    """Components of the parameter's full state, which training needs to update it."""
    frozen: tuple[Component, ...]
    """Components that a frozen (not updated) operator needs to compute outputs and the gradients of its inputs."""

    @property
    def num_elements(self) -> int:
        """Number of captured elements."""
        return self.stop - self.start

    @property
    def block_elements(self) -> int:
        """Number of elements in a block that shares one scale; 1 without scales. Cut the shard only between blocks."""
        return block_elements((*self.full, *self.frozen))


def block_elements(components: Iterable[Component]) -> int:
    """Return the number of elements in a block that shares one scale, or 1 without scales. Cut only between blocks."""
    return SCALE_BLOCK_ELEMENTS if any(component.per_block for component in components) else 1


def operator_of(parameter: str, num_layers: int) -> OperatorId:
    """Return the operator (the unit of snapshots) to which a parameter belongs, by the parameter's global name.

    Every routed expert and every gate is an operator. All other parameters of a layer together are one operator
    (MoEvement, section 3.2; appendix E for layers).
    """
    layer = _LAYER.search(parameter)
    if layer is None:
        # Embedding and head get layer numbers that no layer of the model has.
        is_embedding = parameter.startswith("embedding.")
        return OperatorId(layer=0, kind="embedding") if is_embedding else OperatorId(layer=num_layers + 1, kind="head")
    # Names of parameters count layers from 0, and Megatron's layer numbers count from 1.
    number = int(layer[1]) + 1
    expert = _EXPERT.search(parameter)
    if expert is not None:
        return OperatorId(layer=number, kind="expert", expert=int(expert[1]))
    kind = "gate" if ".mlp.router." in parameter else "non_expert"
    return OperatorId(layer=number, kind=kind)  # type: ignore[arg-type]


def check_shards(shards_by_rank: Sequence[Iterable[StateShard]], sizes: Mapping[tuple[str, int], int]) -> None:
    """Assert that the captured ranges of all ranks together contain every element of every parameter exactly once.

    Args:
        sizes: number of elements of each (parameter, tensor-parallel part).
    """
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {key: [] for key in sizes}
    for shards in shards_by_rank:
        for shard in shards:
            assert shard.start % shard.block_elements == 0, (
                f"{shard.parameter}: element {shard.start} is inside a block"
            )
            ranges[shard.parameter, shard.tensor_part].append((shard.start, shard.stop))
    for key, found in ranges.items():
        position = 0
        # A gap would lose state without an error; an element that two ranks capture would have two values.
        for start, stop in sorted(found):
            problem = "captured twice" if start < position else "not captured"
            assert start == position, f"{key}: elements between {position} and {start} are {problem}"
            position = stop
        assert position == sizes[key], f"{key}: elements from {position} to {sizes[key]} are not captured"
