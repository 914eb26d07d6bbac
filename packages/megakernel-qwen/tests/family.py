"""The published sizes of the family, as their ``config.json`` files have them."""

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}

SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
    "tie_word_embeddings",
)
SIZES = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 48, False),
}


def bare(size="27B", **changes):
    """A text model's ``config.json``; a change to ``...`` takes the field out."""
    fields = COMMON | dict(zip(SIZE_FIELDS, SIZES[size])) | changes
    layers = fields["num_hidden_layers"]
    if "layer_types" not in changes and isinstance(layers, int):
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        fields["layer_types"] = (kinds * max(layers, 0))[: max(layers, 0)]
    return {name: value for name, value in fields.items() if value is not ...}


def nested(text, **outer):
    """The same in the form of multimodal checkpoints."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
        **outer,
    }
