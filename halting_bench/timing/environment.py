"""Where a number was made: versions, commit, device, threads. Nothing here names a user or a folder of theirs."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "numpy", "scipy", "pandas", "pyarrow", "safetensors", "lm-eval", "triton", "nvidia-ml-py")


def stamp(device: str | None = None, dtype: str | None = None) -> dict[str, Any]:
    """The environment of a run, JSON-able.

    Args:
        device: a torch device name; None for what is known without importing torch.
        dtype: of the model's weights.
    """
    return {
        "halting_bench": _version("halting-bench"),
        **_source(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "mhz": _cpu_mhz()},
        "dtype": dtype,
        "device": None if device is None else _device(device),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source() -> dict[str, Any]:
    """The commit of the checkout that this package lies in, and whether tracked files differ from it; None from a wheel."""
    root = Path(__file__).parents[2]
    unknown = {"commit": None, "dirty": None}
    if not (root / "pyproject.toml").is_file():
        return unknown
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return unknown


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _cpu_info(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _cpu_model() -> str | None:
    return _cpu_info("model name") or platform.processor() or None


def _cpu_mhz() -> float | None:
    """The first core's clock at this moment."""
    mhz = _cpu_info("cpu MHz")
    return float(mhz) if mhz else None


def _device(device: str) -> dict[str, Any]:
    import torch

    if not device.startswith("cuda"):
        return {"type": "cpu", "threads": torch.get_num_threads()}
    from halting_bench.timing.telemetry import telemetry_for

    properties = torch.cuda.get_device_properties(torch.device(device))
    telemetry = telemetry_for(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": telemetry.driver() if telemetry else None,
        "clocks": asdict(telemetry.read()) if telemetry else None,
        "threads": torch.get_num_threads(),
    }
