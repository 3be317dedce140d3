"""DeepSeek-V3 (671B) from its published sizes (https://arxiv.org/abs/2412.19437, section 4.2)."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

config = DeepseekV3Config(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)


def build_model():
    return DeepseekV3ForCausalLM(config)


def example_inputs(batch_size, sequence=4096):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence))
    return {"input_ids": tokens, "labels": tokens}
