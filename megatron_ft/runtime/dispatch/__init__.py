"""Token dispatch for MoE layers whose experts have several copies. Each token goes to one copy of its expert."""
