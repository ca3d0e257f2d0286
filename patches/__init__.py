"""Every change `megatron_rl` makes to a dependency, one small named function each. The ledger is `README.md` beside this file."""

from .core import Anchor, Dependency, Patch, active

__all__ = ["Anchor", "Dependency", "Patch", "active"]
