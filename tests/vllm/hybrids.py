"""Write a small model with random weights: `python tests/vllm/hybrids.py KIND DIRECTORY`. In vLLM's environment.

Weights are larger than transformers makes them, so that every block and every state changes the answer.
"""

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MIXTURE = {"num_experts_per_tok": 2}
WINDOW = 48
"""Not a multiple of a block."""


def kinds() -> dict[str, PreTrainedConfig]:
    window = "sliding_attention", "full_attention"
    return {
        # One group: 8 KiB of a token in bfloat16.
        "llama": LlamaConfig(
            num_hidden_layers=4,
            intermediate_size=1024,
            **COMMON | {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
        ),
        # Two groups: windows and full attention in turn, experts, sinks.
        "gpt-oss": GptOssConfig(
            num_hidden_layers=4,
            sliding_window=128,
            num_local_experts=4,
            intermediate_size=128,
            **COMMON | HEADS | MIXTURE | {"head_dim": 64},
        ),
        # Three groups: two of windows, one of full attention.
        "gemma": Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=WINDOW,
            layer_types=[window[0], window[0], window[1]] * 2,
            intermediate_size=256,
            query_pre_attn_scalar=32,
            **COMMON | HEADS,
        ),
        # States of Mamba2 beside full attention.
        "granite": GraniteMoeHybridConfig(
            num_hidden_layers=4,
            layer_types=["mamba", "mamba", "mamba", "attention"],
            intermediate_size=128,
            shared_intermediate_size=128,
            num_local_experts=4,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=32,
            attention_multiplier=0.2,
            **COMMON | MIXTURE | {name: size for name, size in HEADS.items() if name != "head_dim"},
        ),
        # States of a gated delta net beside full attention.
        "qwen": Qwen3NextConfig(
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            intermediate_size=128,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            num_experts=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            **COMMON | HEADS | MIXTURE | {"head_dim": 64},
        ),
        # One latent vector of a token and layer, and none for each head.
        "deepseek": DeepseekV3Config(
            num_hidden_layers=4,
            intermediate_size=256,
            moe_intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            **COMMON | MIXTURE,
        ),
    }


SHARPER = {
    "q_proj": 6.0,
    "k_proj": 6.0,
    "v_proj": 4.0,
    "o_proj": 4.0,
    "mlp": 4.0,
    "lm_head": 6.0,
    "in_proj": 3.0,
    "out_proj": 4.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=kinds())
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(kinds()[given.kind]).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(next((factor for part, factor in SHARPER.items() if part in name), 1.0))
    model.save_pretrained(given.directory, safe_serialization=True)


if __name__ == "__main__":
    main()
