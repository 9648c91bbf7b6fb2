"""Peak memory of loading a checkpoint, against its size on disk: a model must not be in memory twice.

Run: python -m perf.load_memory
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from perf.figure import figure

COMMAND = "python -m perf.load_memory"
TARGET = 1.25


def write_checkpoint(folder: Path, *, shards: int, megabytes: int = 512) -> int:
    """A looped model of about `megabytes` of random bfloat16 weights in `shards` files. Returns the bytes of its tensors."""
    import json

    import torch
    from safetensors.torch import save_file

    from halting_bench.architectures.ouro import Ouro

    config = {
        "model_type": "ouro", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 32768, "rms_norm_eps": 1e-6, "total_ut_steps": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.device("meta"):
        per_layer = sum(p.numel() for p in Ouro(config).model["layers"][0].parameters())
        rest = sum(p.numel() for p in Ouro({**config, "num_hidden_layers": 1}).parameters()) - per_layer
    config["num_hidden_layers"] = max(1, round((megabytes * 2**19 - rest) / per_layer))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Ouro(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    names, weight_map = sorted(shapes), {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        weight_map.update(dict.fromkeys(part, file))
        save_file({n: torch.randn(shapes[n], generator=generator).bfloat16() for n in part}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(2 * shape.numel() for shape in shapes.values())


def resident(field: str) -> int:
    """Bytes of this process in Linux's books: VmRSS (now) or VmHWM (the peak); getrusage's is inherited from a parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def growth(folder: Path, dtype: str) -> float:
    """Peak resident bytes that loading added, over the bytes of the weight files; measured in this process."""
    import torch

    from halting_bench.architectures.load import load_model
    from halting_bench.architectures.weights import Checkpoint

    size = Checkpoint(folder).nbytes
    torch.zeros(1).bfloat16().float()  # what the library allocates once is not the model's
    before = resident("VmRSS")
    model = load_model(folder, dtype=getattr(torch, dtype))
    peak = resident("VmHWM")
    del model
    return (peak - before) / size


def measurements() -> list[dict]:
    """One row for a single file and one for shards, each in a fresh process."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for shards in (1, 4):
            folder = Path(scratch) / str(shards)
            folder.mkdir()
            size = write_checkpoint(folder, shards=shards)
            argv = [sys.executable, "-m", "perf.load_memory", str(folder), "bfloat16"]
            ratio = float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
            name = f"peak memory growth loading {size / 1e6:.0f} MB in {shards} file{'s' * (shards > 1)}"
            rows.append(figure(name, ratio, "x checkpoint", f"<= {TARGET}", COMMAND))
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(growth(Path(sys.argv[1]), sys.argv[2]))
    else:
        for row in measurements():
            print(row)
