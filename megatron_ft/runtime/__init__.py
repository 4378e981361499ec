"""Operations on tensors and process groups. This folder imports torch, but neither Megatron nor the control plane."""
