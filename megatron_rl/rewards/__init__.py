"""Rewards: `build` makes the verifier that the configuration names, `score_all` puts it to work."""

from megatron_rl.rewards.verifiers import Verifier, build, score_all

__all__ = ["Verifier", "build", "score_all"]
