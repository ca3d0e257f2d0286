"""Packaging of megatron_rl; what the tools (ruff, mypy, pytest) need to know stands in pyproject.toml."""

from setuptools import find_packages, setup

TASKS = ["reasoning-gym==0.1.25"]
MATH = ["math-verify==0.9.0"]

setup(
    name="megatron-rl",
    version="0.1.0",
    description="RL post-training of mixture-of-experts language models with Megatron-core and SGLang, and a laboratory for their mismatch",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["py.typed"], "megatron_rl.page": ["assets/*"], "megatron_rl.lab": ["*.css"]},
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
    # Ranges, not pins: a cluster brings its own torch. tools/install.sh pins what the laptop and CI use.
    install_requires=[
        "torch>=2.8,<2.15",
        "numpy>=1.26,<3",
        "transformers>=5.3,<6",
        "tokenizers>=0.22",
        "safetensors>=0.5",
        "jsonargparse[signatures]>=4.49,<5",
        "PyYAML>=6",
        "psutil>=5.9",  # megatron-core needs it and does not say so
        "aiohttp>=3.10,<4",
        "anyio>=4.4,<5",
        "orjson>=3.10,<4",
        "stamina>=24.3",
        "rich>=13.9,<16",
        "tensorboard>=2.16,<3",
        "pyarrow>=17,<28",  # the record of a run
    ],
    extras_require={
        "tasks": TASKS,
        "math": MATH,
        "cpu": ["megatron-core==0.16.1", *TASKS, *MATH],
        # megatron-core's own floor: 0.16.1 is the newest for Python 3.11. SGLang lives in another environment on GPUs.
        "gpu": [
            "megatron-core==0.16.1; python_version < '3.12'",
            "megatron-core==0.19.2; python_version >= '3.12'",
            "transformer-engine[pytorch]>=2.9,<3",
            *TASKS,
            *MATH,
        ],
        "lab-quant": ["nvidia-modelopt>=0.47"],  # the int8 rounding of `lab measure --quantiser modelopt`; works on CPU
        "real-weights": ["gguf>=0.17", "accelerate>=1.1"],  # tools/fetch_smollm2.py; transformers reads GGUF with both
        "docs": ["matplotlib>=3.9"],  # the plots of tools/method_pages.py
        "dev": [
            "ruff>=0.14",
            "mypy>=1.18",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "types-PyYAML",
            "playwright>=1.50",
        ],
    },
)
