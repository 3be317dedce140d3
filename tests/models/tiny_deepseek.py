"""A tiny DeepSeek-V3 from the transformers library: latent attention, shared experts, a dense block."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def build_model():
    config = DeepseekV3Config(
        hidden_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        vocab_size=96,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return DeepseekV3ForCausalLM(config)


def example_inputs(batch_size, sequence=16):
    ids = torch.randint(96, (batch_size, sequence))
    return {"input_ids": ids, "labels": ids}
