"""Run as a program: sweeps that are killed at random moments and then finished, each in a process of its own.

    python killing.py FOLDER KILLS

The moments are spread over the work in processor time, which a busy machine does not stretch. Prints, as JSON, how many
sweeps were killed at work and the sha256 of every points.parquet, the first of them of a sweep that nobody disturbed.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from toy_sweeps import settings

from halting_bench.sweep_config import LatencyConfig, SweepConfig
from halting_bench.sweeping.run import sweep

torch.set_num_threads(1)
TICK = os.sysconf("SC_CLK_TCK")


def few(folder: Path) -> SweepConfig:
    """A rule with a curve, a combination, and a class of the user's own; the best of them acted out."""
    names = ("latent-diff", "entropy-and-kl", f"{folder / 'patient.py'}@Patient")
    return settings(folder, policies=names, execute=True, latency=LatencyConfig(enabled=False))


def start(folder: Path, out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        sweep(few(folder), out=out)
        os._exit(0)
    return pid


def seconds(pid: int) -> float:
    """Processor time of a child so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def killed(pid: int, after: float) -> bool:
    """Kills a child once it has worked that long. False: it was done before."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if seconds(pid) >= after:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert status == 0, f"the sweep ended with {status}"
    return False


def finish(folder: Path, out: Path) -> str:
    _, status = os.waitpid(start(folder, out), 0)
    assert status == 0, f"the sweep ended with {status}"
    return hashlib.sha256((out / "points.parquet").read_bytes()).hexdigest()


def main(folder: Path, wanted: int) -> None:
    rng = random.Random(0)
    digests = [finish(folder, folder / "whole")]
    whole = resource.getrusage(resource.RUSAGE_CHILDREN)
    work = whole.ru_utime + whole.ru_stime
    kills, out = 0, folder / "killed"
    while kills < wanted:
        if killed(start(folder, out), rng.uniform(0, work)):
            kills += 1
            continue
        digests.append(hashlib.sha256((out / "points.parquet").read_bytes()).hexdigest())
        shutil.rmtree(out)
    digests.append(finish(folder, out))
    print(json.dumps({"kills": kills, "digests": digests}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
