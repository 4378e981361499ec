"""Architecture of the model, a mixture-of-experts GPT (group ``model``)."""

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """Architecture of a decoder-only transformer with mixture-of-experts layers. The names are those of
    Megatron-Core."""

    name: str = "moe_tiny"
    """Short name for run names and reports."""
    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Query heads; must divide ``hidden_size`` unless ``kv_channels`` is given."""
    num_query_groups: int | None = None
    """Key/value heads (grouped-query attention); null means one per query head."""
    kv_channels: int | None = None
    """Width of one attention head; null means ``hidden_size / num_attention_heads``."""
    seq_length: int = 128
    """Tokens per training sample."""
    max_position_embeddings: int | None = None
    """Rows of a learned position table; null means ``seq_length``."""
    vocab_size: int | None = None
    """Entries of the vocabulary. null means the size of the tokenizer's vocabulary, which is also the minimum."""
    make_vocab_size_divisible_by: int = 128
    """Divisor of the padded vocabulary size. Must be a multiple of ``parallel.tensor_model_parallel_size``."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output head has its own weights."""
    position_embedding_type: str = "rope"
    """``rope`` or ``learned_absolute``."""
    rotary_base: int = 10000
    """Base period of rotary position embeddings."""
    rotary_percent: float = 1.0
    """Share of a head's channels that is rotated."""
    normalization: str = "RMSNorm"
    """``RMSNorm`` or ``LayerNorm``."""
    layernorm_epsilon: float = 1e-5
    """Term added to the variance."""
    gated_linear_unit: bool = True
    """SwiGLU-style gate in every MLP and expert."""
    activation: str = "silu"
    """``silu`` or ``gelu``."""
    add_bias_linear: bool = False
    """Use biases in linear layers."""
    add_qkv_bias: bool = False
    """Use a bias only in the query/key/value projection."""
    qk_layernorm: bool = False
    """Normalise queries and keys per head."""
    ffn_hidden_size: int = 256
    """Width of a dense MLP."""
    hidden_dropout: float = 0.0
    """Dropout probability after attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections use this over sqrt(2 * num_layers)."""

    num_moe_experts: int | None = 8
    """Routed experts per MoE layer; null makes a dense model."""
    moe_layer_freq: int = 1
    """Distance between MoE layers: layers n, 2n, ... (from 1) are MoE layers, except among the first
    ``moe_first_dense_layers`` layers."""
    moe_first_dense_layers: int = 0
    """Number of first layers that are dense regardless of ``moe_layer_freq``."""
    moe_ffn_hidden_size: int | None = 256
    """Width of one expert; null means ``ffn_hidden_size``."""
    moe_router_topk: int = 2
    """Experts per token."""
    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts, which process every token; null for none."""
    moe_shared_expert_gate: bool = False
    """Scale the shared expert's output by a learned sigmoid gate."""
    router: str = "learned"
    """``learned`` or ``trace``. ``trace`` routes tokens so that loads follow ``router_trace_file``; gate weights are
    still computed and trained."""
    router_trace_file: str | None = None
    """Recorded loads for ``trace``. Layers take the recorded layers in order, and the most loaded experts of each."""
    router_trace_start: int = 0
    """Record of the first iteration, from 0. Each iteration takes the next record; after the last one comes the
    first."""
    moe_router_score_function: str = "softmax"
    """``softmax`` or ``sigmoid``."""
    moe_router_pre_softmax: bool = False
    """Softmax before top-k instead of after it."""
    moe_router_num_groups: int | None = None
    """Groups for group-limited routing; null for none."""
    moe_router_group_topk: int | None = None
    """Number of groups to which a token may be routed."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the routing weights."""
    moe_router_load_balancing_type: str = "aux_loss"
    """``aux_loss``, ``seq_aux_loss``, ``global_aux_loss``, ``sinkhorn`` or ``none``."""
    moe_aux_loss_coeff: float = 0.01
    """Weight of the load-balancing loss."""
    moe_z_loss_coeff: float | None = 0.001
    """Weight of the router z-loss; null for none."""
    moe_router_enable_expert_bias: bool = False
    """Auxiliary-loss-free balancing by a bias per expert (needs ``sigmoid`` scores)."""
    moe_router_bias_update_rate: float = 0.001
    """Update step of the expert bias per iteration."""
    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert divided by an even share of tokens; null drops no tokens."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity."""
    moe_token_drop_policy: str = "probs"
    """Order in which tokens beyond the capacity are dropped: by ``probs`` or by ``position``."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek)."""
    q_lora_rank: int | None = None
    """Rank of the query projection; null for a full projection."""
    kv_lora_rank: int = 512
    """Rank of the joint key/value projection."""
    qk_head_dim: int = 128
    """Channels of a query/key head without position."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query/key head that carry the position."""
    v_head_dim: int = 128
    """Channels of a value head."""
    published_parameters: int | None = None
    """Parameter count that the model's authors published; ``dry_run`` compares the plan with it. null if there is
    none."""
    published_active_parameters: int | None = None
    """Active parameters per token as published by the model's authors; null if none."""
    published_parameters_source: str = ""
    """Publication that contains these counts, and how they are rounded."""
