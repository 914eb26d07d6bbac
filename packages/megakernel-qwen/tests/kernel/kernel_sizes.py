"""Configurations of published sizes, for kernels that are only compiled."""

from megakernel_qwen.config import QwenConfig


def published(**sizes):
    """A config of the family; the sizes that all published models share are filled in."""
    text = {
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }
    return QwenConfig.from_json({"model_type": "qwen3_5", "text_config": text | sizes})


def qwen_27b():
    return published(
        hidden_size=5120,
        intermediate_size=17408,
        linear_num_value_heads=48,
        num_attention_heads=24,
        num_hidden_layers=64,
    )


def qwen_4b():
    return published(
        hidden_size=2560,
        intermediate_size=9216,
        linear_num_value_heads=32,
        num_attention_heads=16,
        num_hidden_layers=32,
        tie_word_embeddings=True,
    )


def qwen_08b():
    return published(
        hidden_size=1024,
        intermediate_size=3584,
        linear_num_value_heads=16,
        num_attention_heads=8,
        num_hidden_layers=24,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
