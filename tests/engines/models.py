"""Write a model with random weights: `python tests/engines/models.py SHAPE DIRECTORY`. Runs in an engine's environment.

Attention weighs much in these models: what a block holds, and which tokens it is of, changes the answer.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
WINDOW_TOKENS = 64
LAYERS = 4
SHAPES = {
    # KV cache of a token: 4 layers x 2 x 4 heads x 32 elements.
    "tiny": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    # 16 layers x 2 x 8 heads x 128 elements: 64 KiB in bfloat16.
    "fat": {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
    # Every second layer sees a sliding window. Its keys and values have a pool of their own.
    "window": {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "mlp_layer_types": ["dense"] * LAYERS,
        "sliding_window": WINDOW_TOKENS,
    },
    # Latent attention: one row of 576 elements a layer. No layer has experts.
    "latent": {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
    },
}
SHAPES["groups"] = SHAPES["tiny"]  # of a family that SGLang also computes with DP attention
SHAPES["stranger"] = SHAPES["tiny"]  # another model of the same form
SEEDS = {"stranger": 4321}
FAMILIES = {"groups": "qwen3", "window": "mellum", "latent": "deepseek_v2"}
SHARPER = {"q_proj": 8.0, "k_proj": 8.0, "v_proj": 4.0, "o_proj": 4.0, "mlp": 4.0, "lm_head": 4.0}
"""How much larger weights are than transformers makes them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    torch.manual_seed(SEEDS.get(given.shape, 1234))
    config = AutoConfig.for_model(
        FAMILIES.get(given.shape, "llama"),
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        **SHAPES[given.shape],
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(next((factor for part, factor in SHARPER.items() if part in name), 1.0))
    model.save_pretrained(given.directory, safe_serialization=True)
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(
        given.directory
    )


if __name__ == "__main__":
    main()
