"""Architecture of the model, a mixture-of-experts GPT (group ``model``), and its number formats (``precision``)."""

from dataclasses import dataclass

YARN_KEYS = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    "mscale_all_dim",
)
"""Keys that have an effect only with ``rope_type=yarn``."""


@dataclass
class ModelConfig:
    """Architecture of a decoder-only transformer with MoE layers. Keys have the names of Megatron-Core."""

    name: str = "moe_tiny"
    """Short name of the model, for run names and reports."""
    num_layers: int = 4
    """Number of transformer layers."""
    hidden_size: int = 128
    """Hidden size: number of channels of the residual stream."""
    num_attention_heads: int = 4
    """Number of query heads; must divide ``hidden_size`` if ``kv_channels`` is null."""
    num_query_groups: int | None = None
    """Number of key/value heads (grouped-query attention); null means one per query head."""
    kv_channels: int | None = None
    """Width of one attention head; null means ``hidden_size / num_attention_heads``."""
    seq_length: int = 128
    """Number of tokens per training sample."""
    max_position_embeddings: int | None = None
    """Number of rows of a learned position table; null means ``seq_length``."""
    vocab_size: int | None = None
    """Number of vocabulary entries, not below the tokenizer's vocabulary size. null means the tokenizer's size."""
    make_vocab_size_divisible_by: int = 128
    """Divisor of the padded vocabulary size. Must be a multiple of ``parallel.tensor_model_parallel_size``."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output head has weights of its own. If false, it uses the weights of the embedding."""
    position_embedding_type: str = "rope"
    """Position embedding: ``rope`` or ``learned_absolute``."""
    rotary_base: int = 10000
    """Base of the wavelengths of rotary position embeddings (theta)."""
    rotary_percent: float = 1.0
    """Share of a head's channels to which rotary position embeddings apply."""
    normalization: str = "RMSNorm"
    """Kind of norm: ``RMSNorm`` or ``LayerNorm``."""
    layernorm_epsilon: float = 1e-5
    """Term added to the variance in norms (epsilon)."""
    gated_linear_unit: bool = True
    """Use a gated activation such as SwiGLU in every MLP and expert."""
    activation: str = "silu"
    """Activation function: ``silu`` or ``gelu``."""
    add_bias_linear: bool = False
    """Use biases in linear layers."""
    add_qkv_bias: bool = False
    """Use a bias in the query/key/value projection, even without ``add_bias_linear``."""
    qk_layernorm: bool = False
    """Normalise queries and keys of each head."""
    ffn_hidden_size: int = 256
    """Width of the MLP in a dense layer."""
    hidden_dropout: float = 0.0
    """Dropout probability after attention and after the MLP."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; for output projections it is divided by sqrt(2 * num_layers)."""

    num_moe_experts: int | None = 8
    """Number of routed experts per MoE layer; null makes a dense model."""
    moe_layer_freq: int = 1
    """Distance n between MoE layers: layers n, 2n, ... (from 1) are MoE layers, except the first
    ``moe_first_dense_layers`` layers."""
    moe_first_dense_layers: int = 0
    """Number of layers at the beginning that are dense regardless of ``moe_layer_freq``."""
    moe_ffn_hidden_size: int | None = 256
    """Width of one expert; null means ``ffn_hidden_size``."""
    moe_router_topk: int = 2
    """Number of experts to which a token is routed."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts, which process every token; null means no shared experts."""
    moe_shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate."""
    router: str = "learned"
    """Router: ``learned``, or ``trace``, which routes tokens so that expert loads follow ``router_trace_file``. With
    ``trace``, the gate is still computed and trained."""
    router_trace_file: str | None = None
    """File of recorded loads for ``router=trace``. The n-th MoE layer uses the loads of the n-th recorded layer."""
    router_trace_start: int = 0
    """Index (from 0) of the record in ``router_trace_file`` that the first iteration uses. Each iteration uses the next
    record. After the last record, the first record follows."""
    moe_router_score_function: str = "softmax"
    """Score function of the router: ``softmax`` or ``sigmoid``."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax before top-k selection instead of after it."""
    moe_router_num_groups: int | None = None
    """Number of expert groups for group-limited routing; null turns it off."""
    moe_router_group_topk: int | None = None
    """Number of groups to which one token may be routed."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor by which routing weights are multiplied; null does not multiply them."""
    moe_router_load_balancing_type: str = "aux_loss"
    """Method of load balancing: ``aux_loss``, ``seq_aux_loss``, ``global_aux_loss``, ``sinkhorn`` or ``none``."""
    moe_aux_loss_coeff: float = 0.01
    """Weight of the auxiliary load-balancing loss."""
    moe_z_loss_coeff: float | None = 0.001
    """Weight of the router z-loss; null turns it off."""
    moe_router_enable_expert_bias: bool = False
    """Balance loads by a bias per expert, without an auxiliary loss. Needs ``moe_router_score_function=sigmoid``."""
    moe_router_bias_update_rate: float = 0.001
    """Amount by which an expert's bias changes in each iteration."""
    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert, as a multiple of the mean number of tokens per expert; null never drops tokens."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity."""
    moe_token_drop_policy: str = "probs"
    """Order in which tokens beyond the capacity are dropped: by ``probs`` or by ``position``."""
    multi_latent_attention: bool = False
    """Use multi-head latent attention (DeepSeek)."""
    q_lora_rank: int | None = None
    """Rank of the low-rank query projection of latent attention; null for a full projection."""
    kv_lora_rank: int = 512
    """Rank of the low-rank projection of keys and values of latent attention."""
    qk_head_dim: int = 128
    """Number of channels of a query or key head that contain no position information."""
    qk_pos_emb_head_dim: int = 64
    """Number of channels of a query or key head that contain position information."""
    v_head_dim: int = 128
    """Number of channels of a value head."""
    rope_type: str | None = None
    """``yarn`` extends the rotary position embedding of latent attention to sequences longer than those of an earlier
    training. The keys from here to ``mscale_all_dim`` are its parameters. null: no extension."""
    rotary_scaling_factor: float | None = None
    """Ratio of the sequence length to the sequence length of the earlier training (yarn); null means 40."""
    original_max_position_embeddings: int | None = None
    """Sequence length of the earlier training, in tokens (yarn); null means 4096."""
    beta_fast: float | None = None
    """A channel keeps its wavelength if it makes at least this many rotations within the sequence length of the earlier
    training (yarn); null means 32."""
    beta_slow: float | None = None
    """A channel's wavelength is scaled with the full factor if the channel makes at most this many rotations within the
    sequence length of the earlier training (yarn); null means 1."""
    mscale: float | None = None
    """Coefficient with which yarn corrects the attention scale for rotated channels; null means 1."""
    mscale_all_dim: float | None = None
    """Coefficient with which yarn corrects the attention scale for all channels; null means 0. The correction that
    ``mscale`` gives is divided by this correction."""
    published_parameters: int | None = None
    """Parameter count that the model's authors published; null if unknown. ``dry_run`` compares the count that it
    computes with this number."""
    published_active_parameters: int | None = None
    """Active parameters per token that the model's authors published; null if there is no such count."""
    published_parameters_source: str = ""
    """Source of ``published_parameters`` and ``published_active_parameters``, and a note on their rounding."""


@dataclass
class PrecisionConfig:
    """Number formats of weights, activations and gradients, and loss scaling."""

    params_dtype: str = "fp32"
    """Format of compute weights and activations: ``fp32``, ``bf16`` or ``fp16``."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in FP32 instead of ``params_dtype``."""
    fp8: str | None = None
    """Format of the operands of linear layers: ``hybrid`` (E4M3, and E5M2 for output gradients), ``e4m3``, or null for
    ``params_dtype``. Weights stay in ``params_dtype`` and are quantized for each product. Needs TP=1 and the local
    layers."""
    regime: str | None = None
    """Formats of compute weights, master weights and both moments: one of the five regimes of MoEvement's table 7, such
    as ``fp8_fp16_fp8_fp16``, or null for FP32 master weights and moments. FP16 and FP8 state has one scale per 64
    consecutive elements. Choose the regime with ``precision=<regime>``, which sets the other keys, too."""
    fp8_recipe: str = "tensorwise"
    """Elements of an FP8 operand that share a scale: all (``tensorwise``) or 64 consecutive ones (``blockwise``). With
    ``delayed``, all share a scale, which is computed from the operand's largest magnitudes in earlier iterations.
    ``mxfp8`` is refused with ``fp8``."""
    fp8_amax_history_length: int = 16
    """Number of iterations whose largest magnitudes determine the scales of ``fp8_recipe=delayed``."""
    loss_scale: float | None = None
    """Constant loss scale for ``fp16``; null uses dynamic loss scaling."""
    initial_loss_scale: float = 65536.0
    """Dynamic loss scale at the start."""
    min_loss_scale: float = 1.0
    """Lower limit of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Number of iterations without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Number of overflows after which the dynamic loss scale is halved."""

    @property
    def has_histories(self) -> bool:
        """Whether layers keep histories of largest magnitudes, from which ``fp8_recipe=delayed`` computes scales."""
        return self.fp8 is not None and self.fp8_recipe == "delayed"

    @property
    def optimizer_formats(self) -> tuple[str, str, str] | None:
        """Formats of master weights, first moment and second moment, each ``fp32``, ``fp16`` or ``fp8``. None if
        ``regime`` is null."""
        return None if self.regime is None else (*self.regime.split("_")[1:],)  # type: ignore[return-value]
