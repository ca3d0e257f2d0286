#!/usr/bin/env python
"""What recording costs a real run in wall-clock time: every other step is recorded, so that both kinds see the same machine.

    torchrun --nproc-per-node 2 tools/bench/recording_live.py --config examples/configs/quickstart.yaml --model.path runs/quickstart/warm

Arguments are those of `megatron-rl train`. A recorded step ends when everything of it is on disk. The first two steps warm up. Rank 0
prints the medians of both kinds, in seconds, and by what share of the step recorded steps are longer: the median over neighbours.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only tools/bench is on the path

from megatron_rl import cli, loop
from megatron_rl.run import Run

WARM_UP = 2


def main() -> int:
    """Trains, and prints what was measured."""
    train_step, seconds = loop.train_step, []

    def timed(run: Run, step: int) -> dict[str, float]:
        """A step; an odd one without recording."""
        records, recorder = run.records, run.recorder
        if step % 2:
            run.records, run.recorder = False, None
        began = time.perf_counter()
        values = train_step(run, step)
        run.records, run.recorder = records, recorder
        if recorder is not None and not step % 2:
            recorder.wait()
        seconds.append(time.perf_counter() - began)
        if run.mesh.is_main and step + 1 == run.config.train.steps:
            print(json.dumps(compared(seconds[WARM_UP:])))
        return values

    loop.train_step = timed
    return cli.main(["train", *sys.argv[1:]])


def compared(seconds: list[float]) -> dict[str, float]:
    """Of steps that are recorded and not, in turn."""
    recorded, plain = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    # Every step but the first and the last stands between two of the other kind.
    longer = [(-1) ** i * (seconds[i] - (seconds[i - 1] + seconds[i + 1]) / 2) for i in range(1, len(seconds) - 1)]
    return {"steps": len(seconds), "recorded_s": recorded, "plain_s": plain, "overhead": statistics.median(longer) / plain}


if __name__ == "__main__":
    raise SystemExit(main())
