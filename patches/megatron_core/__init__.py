"""megatron-core on machines without CUDA: call `install()` once, before the first `import megatron.core`."""

from .ledger import PATCHES, install

__all__ = ["PATCHES", "install"]
