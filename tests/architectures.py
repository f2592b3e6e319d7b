"""Tiny models of many architectures, made from their configs alone."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

TEXT = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
TEXT |= dict(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TIED = dict(tie_word_embeddings=True)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
MOE = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2)
MOE |= dict(moe_intermediate_size=16, decoder_sparse_step=1)
OF_GROUPS = dict(n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
# DeepSeek's attention.
MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
MLA |= dict(v_head_dim=8, head_dim=4, num_key_value_heads=4, **OF_GROUPS)
LINEAR_ATTENTION = dict(layer_types=["linear_attention", "full_attention"])
LINEAR_ATTENTION |= dict(linear_num_value_heads=4, linear_num_key_heads=2)
LINEAR_ATTENTION |= dict(linear_key_head_dim=8, linear_value_head_dim=8)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
GEMMA = dict(**TIED, **SLIDING)
# Gemma's embeddings for each layer.
BY_LAYER = dict(num_kv_shared_layers=0, hidden_size_per_layer_input=8)
BY_LAYER |= dict(vocab_size_per_layer_input=300)
TOWER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(image_size=28, patch_size=14)
SMALL_MAMBA = dict(mamba_d_state=8, mamba_n_heads=4)
# xLSTM's kernels of plain torch.
OF_TORCH = dict(chunkwise_kernel="chunkwise--native_autograd", step_kernel="native")
OF_TORCH |= dict(sequence_kernel="native_sequence__native")

# By name: the model's type, then what its config has besides `TEXT`.
ARCHITECTURES = {
    "llama": {},
    "llama tied": TIED,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen2_moe": dict(**MOE, shared_expert_intermediate_size=16),
    "qwen3_next": dict(**MOE, **LINEAR_ATTENTION, shared_expert_intermediate_size=16),
    "qwen3_5_text": LINEAR_ATTENTION,
    "gemma": TIED,
    "gemma2": dict(**GEMMA, final_logit_softcapping=5.0),
    "gemma3_text": GEMMA,
    "gemma3": dict(
        **dict(text_config=TEXT | GEMMA, vision_config=TOWER, **TIED),
        **dict(mm_tokens_per_image=4, image_token_index=299),
    ),
    "gemma3n_text": dict(
        **GEMMA, **BY_LAYER, laurel_rank=4, activation_sparsity_pattern=[0.0, 0.0]
    ),
    "gemma4_text": dict(**GEMMA, **BY_LAYER, global_head_dim=8),
    "mistral": dict(sliding_window=8),
    "mixtral": MOE,
    "phi": {},
    "phi3": {},
    "phimoe": MOE,
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": MOE,
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "falcon alibi": dict(new_decoder_architecture=False, alibi=True),
    "persimmon": {},
    "gpt2": GPT,
    "gptj": dict(**GPT, rotary_dim=4),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "gpt_neox": {},
    "gpt_bigcode": GPT,
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "biogpt": {},
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=64),
    "cohere": dict(**TIED, logit_scale=0.25, use_qk_norm=True),
    "cohere2": dict(**GEMMA, logit_scale=0.25),
    "glm": {},
    "glm4": {},
    "glm4_moe": dict(**MOE, **OF_GROUPS),
    "gpt_oss": dict(**MOE, **SLIDING),
    "llama4_text": dict(**MOE, intermediate_size_mlp=64),
    "deepseek_v2": dict(**MOE, **MLA, topk_method="greedy"),
    "deepseek_v3": dict(**MOE, **MLA),
    "deepseek_v32": dict(**MOE, **MLA, index_n_heads=2, index_head_dim=8, index_topk=64),
    "granite": dict(logits_scaling=6.0),
    "granitemoe": dict(**MOE, logits_scaling=4.0),
    "granitemoehybrid": dict(
        **dict(**MOE, **SMALL_MAMBA, mamba_d_head=16, layer_types=["mamba", "attention"]),
        **dict(logits_scaling=4.0, shared_intermediate_size=32),
    ),
    "hyperclovax": dict(logits_scaling=0.25),
    "smollm3": {},
    "stablelm": dict(qk_layernorm=True),
    "recurrent_gemma": dict(
        **dict(block_types=["recurrent", "attention"], lru_width=32),
        **dict(attention_window_size=64, logits_soft_cap=5.0),
    ),
    "falcon_h1": dict(**SMALL_MAMBA, mamba_d_ssm=32, mamba_d_head=8, lm_head_multiplier=0.25),
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1),
    "minimax": dict(**MOE, layer_types=["linear_attention", "full_attention"], block_size=8),
    "rwkv": dict(attention_hidden_size=32, context_length=64),
    "xlstm": dict(
        **OF_TORCH, num_heads=4, embedding_dim=32, num_blocks=2, output_logit_soft_cap=5.0
    ),
    "bloom": dict(n_layer=2, n_head=4),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "starcoder2": {},
    "nemotron": {},
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(**MOE, layer_types=["conv", "full_attention"]),
    "jamba": dict(
        **dict(mamba_d_state=4, mamba_dt_rank=4, num_experts=2, use_mamba_kernels=False),
        **dict(attn_layer_period=2, attn_layer_offset=1),
    ),
    "jetmoe": dict(**MOE, kv_channels=8),
    "ernie4_5": {},
    "exaone4": SLIDING,
    "nanochat": {},
    "seed_oss": {},
}
ARCHITECTURES["gemma4"] = dict(
    text_config={**TEXT, **ARCHITECTURES["gemma4_text"]},
    vision_config=TOWER,
    audio_config=None,
    **TIED,
)
ARCHITECTURES["llama4"] = dict(
    text_config={**TEXT, **ARCHITECTURES["llama4_text"]},
    vision_config=dict(**TOWER, vision_output_dim=16, projector_input_dim=16),
)


# Not all of their weights get a gradient from a row of 60 tokens.
SPARING = {
    "bart": dict(is_decoder=True, is_encoder_decoder=False, decoder_layers=2, dropout=0.0),
    "deepseek_v4": {},
    "zamba2": dict(
        **dict(mamba_d_state=4, n_mamba_heads=8, chunk_size=8, num_mem_blocks=2, head_dim=16),
        **dict(use_shared_attention_adapter=True, adapter_rank=4, num_key_value_heads=4),
        **dict(num_hidden_layers=4, layers_block_type=["mamba", *["hybrid"] * 3]),
    ),
}


def config_of(name: str, **more) -> PreTrainedConfig:
    """The config of an architecture by its name here."""
    settings = {**ARCHITECTURES, **SPARING}[name] | more
    if "text_config" not in settings:
        settings = TEXT | settings
    if "falcon" in name and "h1" not in name:
        del settings["head_dim"]
    return AutoConfig.for_model(name.split()[0], **settings)


def build(name: str, **more) -> torch.nn.Module:
    """A model whose log-probs are far from uniform, so that soft caps and scales show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **more), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model
