"""Measures one paper's claims and writes them as one JSON document: figures with 95 % intervals over documents.

python -m halting_bench.reproduction self --out results/reference
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halting_bench.reproduction.fixed_point import fixed_point
from halting_bench.reproduction.gates import gates
from halting_bench.reproduction.pictures import draw
from halting_bench.reproduction.self_transformer import self_transformer
from halting_bench.reproduction.two_scale import two_scale

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "self": self_transformer,
    "two-scale": two_scale,
    "fixed-point": fixed_point,
    "gates": gates,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures one paper's claims and writes them to a JSON file.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("results/reference"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    target = given.out / f"reproduction-{given.part}.json"
    target.write_text(json.dumps(PARTS[given.part](), indent=1) + "\n")
    print(target)
    draw(given.out)
