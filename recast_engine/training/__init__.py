"""DiffusionNFT training with a timed reward (METHOD section 6)."""

from __future__ import annotations

from recast_engine.training.advantages import group_advantages, optimality, usable_samples
from recast_engine.training.loss import NFTLoss, nft_loss

__all__ = ["NFTLoss", "group_advantages", "nft_loss", "optimality", "usable_samples"]
