"""megatron-core as the patches know it."""

from ..core import Dependency

MEGATRON_CORE = Dependency(
    distribution="megatron-core",
    package="megatron.core",
    version_file="package_info.py",
    version_pattern=r"MAJOR = (\d+)\s+MINOR = (\d+)\s+PATCH = (\d+)",
)
V0_16 = "0.16.1"
V0_19 = "0.19.2"
TESTED = (V0_16, V0_19)
