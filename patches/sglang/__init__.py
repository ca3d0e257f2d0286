"""Changes to SGLang where there is no CUDA, one file a change; ``ledger.PATCHES`` lists them.

``python -m megatron_rl_patches.sglang.launch_server`` is SGLang's server launcher with the changes in. ``plugin.register`` is
the entry point through which SGLang itself loads what need not come before its import.
"""
