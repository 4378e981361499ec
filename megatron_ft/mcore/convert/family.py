"""``Family``: how the weights and settings of one kind of model are named in Hugging Face folders and in this project.

A family is a table of ``Rule``. Each rule names one tensor of a dense checkpoint, the tensors of a Hugging Face folder
with the same values, and the ``Layout`` that converts between the two forms. The converter, the inspection of folders
and the tests read the same table, so a new family is one file with one table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from megatron_ft.config.checks.model import valid_model
from megatron_ft.config.model import YARN_KEYS, ModelConfig
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.operators import is_moe_layer

Shape = tuple[int, ...]


class Layout(Protocol):
    """Conversion between one tensor of a dense checkpoint and one or several tensors of a folder, without rounding."""

    def split(self, tensor: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a folder that have the values of ``tensor``, a tensor of a checkpoint."""

    def merge(self, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
        """Return the tensor of a checkpoint that has the values of ``parts``. This is the inverse of ``split``."""


class Same:
    """Layout of a tensor that is equal in a checkpoint and in a folder."""

    def split(self, tensor: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        return (tensor,)

    def merge(self, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
        return parts[0]


class QueryKeyValue:
    """Layout of the projections of queries, keys and values. Megatron stores them as one tensor, query group by query
    group. Each group has the rows of its query heads, then those of its key head, then those of its value head."""

    def split(self, tensor: torch.Tensor, model: ModelConfig) -> tuple[torch.Tensor, ...]:
        groups, heads, width = _attention(model)
        rest = tensor.shape[1:]
        per_group = tensor.reshape(groups, heads // groups + 2, width, *rest)
        query = per_group[:, :-2].reshape(heads * width, *rest)
        key, value = (per_group[:, place].reshape(groups * width, *rest) for place in (-2, -1))
        return query, key, value

    def merge(self, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
        groups, heads, width = _attention(model)
        rest = parts[0].shape[1:]
        query = parts[0].reshape(groups, heads // groups, width, *rest)
        key, value = (part.reshape(groups, 1, width, *rest) for part in parts[1:])
        return torch.cat([query, key, value], dim=1).reshape((heads + 2 * groups) * width, *rest)


def _attention(model: ModelConfig) -> tuple[int, int, int]:
    heads = model.num_attention_heads
    return model.num_query_groups or heads, heads, model.kv_channels or model.hidden_size // heads


SAME, QUERY_KEY_VALUE = Same(), QueryKeyValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule for one tensor, or for one tensor per layer or expert: its names, its shape and its conversion."""

    ours: str
    """Name in a dense checkpoint. ``{layer}`` and ``{expert}`` stand for indices of a layer and an expert, from 0."""
    theirs: tuple[str, ...]
    """Names of the tensors in a Hugging Face folder."""
    shape: Callable[[ModelConfig], Shape]
    """Shape of the tensor in the checkpoint."""
    layout: Layout = SAME
    kind: str = "all"
    """Kind of layers that have the tensor, if its name contains ``{layer}``: ``all``, ``moe`` or ``dense``."""
    when: Callable[[ModelConfig], bool] = lambda model: True
    """Function that takes a model, and returns whether the model has this tensor."""

    def named(self, model: ModelConfig) -> "Iterator[Rule]":
        """Yield one rule per layer and expert of a model, with the numbers of layer and expert in its names."""
        if not self.when(model):
            return
        for layer in range(model.num_layers) if "{layer}" in self.ours else (0,):
            if self.kind != "all" and (self.kind == "moe") != is_moe_layer(model, layer + 1):
                continue
            for expert in range(model.num_moe_experts or 0) if "{expert}" in self.ours else (0,):
                names = [name.format(layer=layer, expert=expert) for name in (self.ours, *self.theirs)]
                yield Rule(ours=names[0], theirs=tuple(names[1:]), shape=self.shape, layout=self.layout)

    def their_shapes(self, model: ModelConfig) -> tuple[Shape, ...]:
        """Return the shapes of this rule's tensors in a Hugging Face folder."""
        whole = torch.empty(self.shape(model), device="meta")
        return tuple(tuple(part.shape) for part in self.layout.split(whole, model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of model: its tensors, and how ``config.json`` describes its settings."""

    name: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """Class in ``architectures`` of ``config.json``."""
    rules: tuple[Rule, ...]
    fixed: Mapping[str, Any]
    """Maps keys of ``model`` to the value that they have in every model of the family."""
    settings: Callable[[ModelConfig], dict[str, Any]]
    """Function that returns the entries of ``config.json`` that describe a model."""
    model: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Function that converts ``config.json`` to keys of ``model``. Raises KeyError if an entry is missing."""
    refused: Callable[[Mapping[str, Any]], str] = lambda config: ""
    """Function that returns the reason why a model with this ``config.json`` cannot be converted, or an empty text."""

    def tensors(self, model: ModelConfig) -> tuple[Rule, ...]:
        """Return one rule for each tensor of a model, with the numbers of layers and experts filled in."""
        return tuple(named for rule in self.rules for named in rule.named(model))

    def check(self, model: ModelConfig) -> None:
        """Check that a model belongs to the family.

        Raises:
            CheckpointError: a setting has a value that the family's ``config.json`` cannot express.
        """
        for key, value in {**_COMMON, **self.fixed}.items():
            found = getattr(model, key)
            if found != value:
                raise CheckpointError(
                    f"model.{key}={found!r}: must be {value!r} to be converted to {self.name}; its config.json cannot "
                    "express another value"
                )

    def read_model(self, config: Mapping[str, Any], where: str) -> ModelConfig:
        """Return the model that ``config.json`` describes; ``where`` names the file in messages.

        Raises:
            CheckpointError: an entry is missing or has another type, or this project does not support the model.
        """
        try:
            return self._read_model(config)
        except KeyError as error:
            raise CheckpointError(f"{where}: has no entry {error.args[0]!r}") from None
        except (CheckpointError, ConfigError, TypeError, ValueError, OverflowError) as error:
            # Functions of the families read the entries without checking types, and so raise errors about types.
            raise CheckpointError(f"{where}: {error}") from None

    def _read_model(self, config: Mapping[str, Any]) -> ModelConfig:
        for name in (*_SIZES, *_OPTIONAL_SIZES):
            value, least = config.get(name, 1), int(name not in _OPTIONAL_SIZES)
            if not (value is None and not least) and (type(value) is not int or not least <= value <= _MOST):
                what = "an integer above 0" if least else "null or an integer of at least 0"
                raise CheckpointError(f"{name}={value!r:.80}: must be {what}, at most {_MOST}")
        if reason := self.refused(config):
            raise CheckpointError(reason)
        keys = self.model(config)
        default = ModelConfig()
        for key, value in keys.items():
            kind = type(getattr(default, key))
            # Check only the types of flags and floating-point numbers here. Sizes were checked above.
            if kind in (bool, float) and not isinstance(value, bool if kind is bool else int | float):
                raise CheckpointError(f"the entry for model.{key} is {value!r:.80}: must be a {kind.__name__}")
        model = ModelConfig(**{**_COMMON, **self.fixed, **keys})
        self.check(model)
        return valid_model(asdict(model))

    def tensors_of(self, model: ModelConfig, num_stored: int, where: str) -> tuple[Rule, ...]:
        """Return one rule for each tensor of ``model``, the model of a folder or checkpoint with ``num_stored``
        tensors. ``where`` names this folder or checkpoint in messages.

        Raises:
            CheckpointError: the model has more layers or experts than there are tensors.
        """
        # Sizes come from a file and may be wrong. Without this check, wrong sizes could fill the memory with names.
        if model.num_layers * max(1, model.num_moe_experts or 0) > num_stored:
            raise CheckpointError(
                f"{where}: has {num_stored} tensors, too few for {model.num_layers} layers of {model.num_moe_experts} "
                "experts"
            )
        return self.tensors(model)


_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "num_experts_per_tok", "num_experts", "num_local_experts"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""Entries of ``config.json`` whose value must be a size, for example a number of layers."""
_OPTIONAL_SIZES = ("head_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace")
"""Entries of ``config.json`` whose value may be null, 0 or a size."""
_MOST = 2**31 - 1
"""Largest number that is accepted as a size in ``config.json``, e.g. as the number of layers."""
_COMMON: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "add_bias_linear": False,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_expert_capacity_factor": None,
}
"""Maps keys of ``model`` to the values that they have in all supported families."""
ONLY_MOE_LAYERS: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "moe_first_dense_layers": 0,
    "moe_router_topk_scaling_factor": None,
}
"""Maps keys of ``model`` to their values in families without latent attention and without dense layers."""


def rope_theta(config: Mapping[str, Any]) -> int:
    """Return the base of rotary embeddings from ``config.json``. Newer versions of Transformers store it in
    ``rope_parameters``, older versions at the top level."""
    inner = config.get("rope_parameters")
    found = inner["rope_theta"] if isinstance(inner, Mapping) and "rope_theta" in inner else config["rope_theta"]
    if not isinstance(found, int | float) or found != int(found):
        raise CheckpointError(f"rope_theta={found!r:.80}: must be a whole number")
    return int(found)


def flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return an entry of ``config.json`` that must be true or false. Raise CheckpointError if it is neither."""
    found = config.get(name, default)
    if not isinstance(found, bool):
        raise CheckpointError(f"{name}={found!r:.80}: must be true or false")
    return found


def scaled_rope(config: Mapping[str, Any]) -> str:
    """Return why the rotary embeddings in ``config.json`` are not supported; empty if they are supported."""
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.get(key)
        if not isinstance(inner, Mapping | None):
            return f"{key}={inner!r:.40}: must be null or an object"
        kind = (inner.get("rope_type") or inner.get("type") or "default") if isinstance(inner, Mapping) else "default"
        if kind != "default":
            return f"{key} has the type {kind!r:.40}: only rotary embeddings without scaling are supported"
    return ""


YARN: Mapping[str, str] = {name: name for name in YARN_KEYS} | {"rotary_scaling_factor": "factor"}
"""Maps the keys of ``model`` for YaRN (``rope_type=yarn``) to the keys of ``rope_scaling`` in ``config.json``."""


def rope_settings(model: ModelConfig) -> dict[str, Any] | None:
    """Return the entry ``rope_scaling`` of ``config.json``; None if rotary embeddings are not scaled."""
    if model.rope_type is None:
        return None
    found = {theirs: getattr(model, ours) for ours, theirs in YARN.items() if getattr(model, ours) is not None}
    # Without these entries, Transformers would use other default values than Megatron-Core.
    defaults = {"factor": 40.0, "original_max_position_embeddings": 4096}
    return {"type": "yarn", "rope_type": "yarn", **defaults, **found}


def limited_window(config: Mapping[str, Any], length: int) -> str:
    """Return why a sliding attention window is not supported. Return an empty text if there is no window, or if it
    covers ``length`` tokens, the largest length of a sequence."""
    is_used = config.get("use_sliding_window", True)
    window = config.get("sliding_window")
    if window is not None and type(window) is not int:
        return f"sliding_window={window!r:.40}: must be null or an integer"
    if not is_used or not window or window >= length:
        return ""
    return f"sliding_window={window!r:.40}: attention windows shorter than max_position_embeddings are not supported"


def common_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of ``config.json`` that have the same name in all families."""
    heads = model.num_attention_heads
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.num_query_groups or heads,
        "head_dim": model.kv_channels or model.hidden_size // heads,
        "hidden_act": model.activation,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.layernorm_epsilon,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "rope_theta": float(model.rotary_base),
        "attention_dropout": model.attention_dropout,
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": model.moe_aux_loss_coeff,
    }


def common_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key of ``model``, from entries of ``config.json`` that have the same name in all families."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config.get("num_key_value_heads") or config["num_attention_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "activation": config["hidden_act"],
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "untie_embeddings_and_output_weights": not flag(config, "tie_word_embeddings", default=False),
        "rotary_base": rope_theta(config),
        "moe_router_topk": config["num_experts_per_tok"],
    }


def hidden(model: ModelConfig) -> Shape:
    """Return the shape of a vector of the hidden size."""
    return (model.hidden_size,)


def vocabulary(model: ModelConfig) -> Shape:
    """Return the shape of the embedding and of the head."""
    return (model.vocab_size or 0, model.hidden_size)


def query_key_value(model: ModelConfig) -> Shape:
    """Return the shape of the joint projection of queries, keys and values."""
    groups, heads, width = _attention(model)
    return ((heads + 2 * groups) * width, model.hidden_size)


def mlp_rules(
    ours: str, theirs: str, names: Sequence[str], width: Callable[[ModelConfig], int], **common: Any
) -> tuple[Rule, ...]:
    """Return the conversion rules of the three weights of a gated MLP.

    Args:
        ours: name of the module in a checkpoint.
        theirs: name of the module in a folder.
        names: names of the projections in the folder: ``gate``, ``up`` and ``down``, in this order.
        width: width of the MLP.
        common: further fields, which are equal in the three rules.
    """
    first = ("linear_fc1.weight_w", "linear_fc1.weight_v")
    rules = [
        Rule(
            ours=f"{ours}.{name}",
            theirs=(f"{theirs}.{their_name}.weight",),
            shape=lambda model: (width(model), model.hidden_size),
            **common,
        )
        for name, their_name in zip(first, names, strict=False)
    ]
    rules.append(
        Rule(
            ours=f"{ours}.linear_fc2.weight",
            theirs=(f"{theirs}.{names[2]}.weight",),
            shape=lambda model: (model.hidden_size, width(model)),
            **common,
        )
    )
    return tuple(rules)


LAYER, THEIR_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"


def outer_rules() -> tuple[Rule, ...]:
    """Return the conversion rules of the embedding, the last norm and the head."""
    return (
        Rule(ours="embedding.word_embeddings.weight", theirs=("model.embed_tokens.weight",), shape=vocabulary),
        Rule(ours="decoder.final_layernorm.weight", theirs=("model.norm.weight",), shape=hidden),
        Rule(
            ours="output_layer.weight",
            theirs=("lm_head.weight",),
            shape=vocabulary,
            when=lambda model: model.untie_embeddings_and_output_weights,
        ),
    )


def attention_rules() -> tuple[Rule, ...]:
    """Return the rules of all tensors except routers, MLPs and experts, for families without latent attention."""
    attention, theirs = f"{LAYER}.self_attention", f"{THEIR_LAYER}.self_attn"
    projections = tuple(f"{theirs}.{letter}_proj" for letter in "qkv")
    head_width = lambda model: (_attention(model)[2],)  # noqa: E731
    return (
        *outer_rules(),
        Rule(
            ours=f"{attention}.linear_qkv.layer_norm_weight",
            theirs=(f"{THEIR_LAYER}.input_layernorm.weight",),
            shape=hidden,
        ),
        Rule(
            ours=f"{attention}.linear_qkv.weight",
            theirs=tuple(f"{name}.weight" for name in projections),
            shape=query_key_value,
            layout=QUERY_KEY_VALUE,
        ),
        Rule(
            ours=f"{attention}.linear_qkv.bias",
            theirs=tuple(f"{name}.bias" for name in projections),
            shape=lambda model: query_key_value(model)[:1],
            layout=QUERY_KEY_VALUE,
            when=lambda model: model.add_qkv_bias,
        ),
        *(
            Rule(
                ours=f"{attention}.{letter}_layernorm.weight",
                theirs=(f"{theirs}.{letter}_norm.weight",),
                shape=head_width,
                when=lambda model: model.qk_layernorm,
            )
            for letter in "qk"
        ),
        Rule(
            ours=f"{attention}.linear_proj.weight",
            theirs=(f"{theirs}.o_proj.weight",),
            shape=lambda model: (model.hidden_size, _attention(model)[1] * _attention(model)[2]),
        ),
        Rule(
            ours=f"{LAYER}.mlp.linear_fc1.layer_norm_weight",
            theirs=(f"{THEIR_LAYER}.post_attention_layernorm.weight",),
            shape=hidden,
        ),
    )


def router_rule(theirs: str) -> Rule:
    """Return the conversion rule of an MoE layer's router. ``theirs`` is the name of its weight in a folder."""
    return Rule(
        ours=f"{LAYER}.mlp.router.weight",
        theirs=(theirs,),
        shape=lambda model: (model.num_moe_experts or 0, model.hidden_size),
        kind="moe",
    )


def expert_width(model: ModelConfig) -> int:
    """Return the width of the MLP of one expert."""
    return model.moe_ffn_hidden_size or model.ffn_hidden_size
