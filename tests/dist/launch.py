"""How a test runs a worker under torchrun."""

from __future__ import annotations

from tools.layouts.launch import ROOT, LaunchError
from tools.layouts.launch import torchrun as launch


def torchrun(worker: str, *args: str, processes: int, timeout: float = 240, path: str | None = None) -> str:
    """Runs tests/dist/workers/<worker> on `processes` gloo ranks; returns its output, fails with it if a rank fails.

    Args:
        path: a folder to put first on the module path (an overlay with another megatron-core).
    """
    try:
        return launch(ROOT / "tests/dist/workers" / worker, *args, processes=processes, timeout=timeout, path=path)
    except LaunchError as error:
        raise AssertionError(str(error)) from None
