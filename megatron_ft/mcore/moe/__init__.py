"""The project's extensions of Megatron's MoE layer: expert replicas, padding, load counts and forced routing."""
