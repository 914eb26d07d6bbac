"""Mixture of experts: the router, routes sorted by expert, experts in a latent space."""

from kda_mla_kernels.moe.experts import ExpertWeights, every_expert, sorted_experts
from kda_mla_kernels.moe.latent import (
    LatentMoeRule,
    LatentMoeTrace,
    LatentMoeWeights,
    MlpWeights,
    latent_moe,
)
from kda_mla_kernels.moe.packed import (
    HeldExperts,
    Packed,
    PackedExperts,
    StackedExperts,
    packed_experts,
    packed_experts_in_tiles,
)
from kda_mla_kernels.moe.router import RouterRule, Routes, choose, dense_weights, router_scores
from kda_mla_kernels.moe.routes import SortedRoutes, sort_routes
from kda_mla_kernels.moe.top_k import top_k_mask

__all__ = [
    "ExpertWeights",
    "HeldExperts",
    "LatentMoeRule",
    "LatentMoeTrace",
    "LatentMoeWeights",
    "MlpWeights",
    "Packed",
    "PackedExperts",
    "RouterRule",
    "Routes",
    "SortedRoutes",
    "StackedExperts",
    "choose",
    "dense_weights",
    "every_expert",
    "latent_moe",
    "packed_experts",
    "packed_experts_in_tiles",
    "router_scores",
    "sort_routes",
    "sorted_experts",
    "top_k_mask",
]
