"""The SGLang model classes ``megatron_rl`` trains, as a package for SGLang's ``SGLANG_EXTERNAL_MODEL_PACKAGE``.

With it SGLang imports its 200 other model files only when a checkpoint asks for one of them, which saves 3 CPU-seconds a start.
One module a class, because SGLang's registry walks the modules of the package.
"""
