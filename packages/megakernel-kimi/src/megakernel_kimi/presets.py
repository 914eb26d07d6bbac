"""Known checkpoints by name, for planning without a download."""

from megakernel_kimi.config import KimiConfig

__all__ = ["kimi_k3"]


def kimi_k3() -> KimiConfig:
    """``moonshotai/Kimi-K3``, text decoder: 2.78 T parameters, 104 B active."""
    return KimiConfig(
        hidden_size=7168,
        num_hidden_layers=93,
        vocab_size=163840,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-5,
        attn_res_block_size=12,
        num_attention_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_layers=(*range(3, 92, 4), 92),
        kda_heads=96,
        kda_head_dim=128,
        conv_kernel_size=4,
        gate_lower_bound=-5.0,
        first_k_dense_replace=1,
        intermediate_size=33792,
        num_experts=896,
        num_experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        moe_renormalize=True,
        routed_scaling_factor=1.0,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )
