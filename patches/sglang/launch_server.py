"""SGLang's server launcher, usable without CUDA:

    python -m megatron_rl_patches.sglang.launch_server <arguments of python -m sglang.launch_server> [--die-with-parent]

``--die-with-parent`` ends the server when the process that started it ends, however that ends; it is the only argument of ours.
With CUDA all else is SGLang's own launcher. Without, the stand-ins of ``ledger.BEFORE_IMPORT`` go in first: here, and in every
process SGLang spawns, because a spawned process imports the main module, as ``__mp_main__``, before anything else.
"""

import os
import sys
from importlib.metadata import entry_points

from .lifetime import die_with_parent, die_with_spawner, exit_on_sigterm

PARENT = os.getppid()
DIE_WITH_PARENT = "--die-with-parent"


def prepare_process() -> None:
    """Make ``import sglang`` possible in this process where there is no CUDA; with CUDA, do nothing.

    Raises:
        RuntimeError: the installed SGLang was not tested.
    """
    import torch
    from megatron_rl_patches.core import apply_patch

    from .ledger import BEFORE_IMPORT

    if torch.cuda.is_available():
        return
    for patch in BEFORE_IMPORT:
        apply_patch(patch)
    # Two switches of SGLang's own, which it reads in every process.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", f"{__package__}.models")


def check_plugin() -> None:
    """Check that SGLang will find ``plugin.register``.

    Raises:
        RuntimeError: this distribution is on the path but not installed.
    """
    target = f"{__package__}.plugin:register"
    if all(entry.value != target for entry in entry_points(group="sglang.srt.plugins")):
        raise RuntimeError(f"no installed distribution names the SGLang plug-in {target}: install this one with pip install ./patches")


def main(arguments: list[str]) -> None:
    """Parse SGLang's arguments and serve until told to stop; then end every child.

    Raises:
        SystemExit: SGLang's parser refused the arguments, or SIGTERM came while starting.
    """
    exit_on_sigterm()
    if DIE_WITH_PARENT in arguments:
        die_with_parent(PARENT)
    check_plugin()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args([argument for argument in arguments if argument != DIE_WITH_PARENT])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    die_with_spawner()
if __name__ in ("__main__", "__mp_main__"):
    prepare_process()
if __name__ == "__main__":
    main(sys.argv[1:])
