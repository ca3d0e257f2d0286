"""SGLang as the patches know it."""

from megatron_rl_patches.core import Dependency

SGLANG = Dependency(
    distribution="sglang",
    package="sglang",
    version_file="_version.py",
    version_pattern=r"__version__ = version = '([^']+)'",
)
TESTED = ("0.5.23",)
