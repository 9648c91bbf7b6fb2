"""Bits per byte of `docs` under xz, under byte n-gram models of a recipe's own training text, and under the trained model.

    python perf/train_text_baselines.py models/huginn-tiny-text/recipe.yaml --model models/huginn-tiny-text

xz: each document on its own, `xz -9e`, container included. n-grams: interpolated Witten-Bell,

    p_n(w | h) = (c(h w) + t(h) p_{n-1}(w | h')) / (c(h) + t(h)),   p_0 = 1 / 256,

with c the counts in the training stream, t(h) the number of different bytes seen after h, h' the context without its oldest
byte. The context begins with the NUL before a document. Prints one JSON document; the n-grams are given the stream twice,
as trained on (repeated documents count again) and with each document once.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from halting_bench.architectures.load import load_model
from halting_bench.benchmarks.base import Benchmark
from halting_bench.benchmarks.text_sources import docs_benchmark
from halting_bench.training.card import table
from halting_bench.training.corpus import build
from halting_bench.training.recipe import load_recipe

DEPTHS = (4, 8, 16, 32)
ORDERS = (3, 4, 5, 6)  # bytes in an n-gram, the predicted one included


def packed(stream: np.ndarray, order: int) -> np.ndarray:
    """The n-grams of a stream as integers, the oldest byte highest. uint8 [N] -> uint64 [N - order + 1]."""
    size = stream.size - order + 1
    out = np.zeros(size, np.uint64)
    for offset in range(order):
        out = (out << np.uint64(8)) | stream[offset : offset + size].astype(np.uint64)
    return out


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`values` at the sorted `keys`, 0 where a wanted key is absent."""
    index = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[index] == wanted, values[index], 0)


def ngram_bits(train: np.ndarray, documents: list[np.ndarray], highest: int) -> dict[int, float]:
    """Bits per byte of the documents (uint8, each with its NUL first) under each order up to `highest`."""
    sizes = [document.size - 1 for document in documents]
    probability = np.full(sum(sizes), 1 / 256)
    edges = np.cumsum([0, *sizes])
    bits = {}
    for order in range(1, highest + 1):
        keys, counts = np.unique(packed(train, order), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        types = np.diff(np.append(first, keys.size))
        totals = np.add.reduceat(counts, first)
        for document, begin in zip(documents, edges, strict=False):
            skip = max(order - 2, 0)  # a document's first bytes have shorter contexts: they keep the lower order's estimate
            grams = packed(document, order)[1 if order == 1 else 0 :]
            part = slice(begin + skip, begin + document.size - 1)
            total, kinds = (lookup(contexts, values, grams >> np.uint64(8)) for values in (totals, types))
            count = lookup(keys, counts, grams)
            seen = total > 0
            lower = probability[part]
            probability[part] = np.where(seen, (count + kinds * lower) / np.maximum(total + kinds, 1), lower)
        bits[order] = float(-np.log2(probability).mean())
    return bits


def once(train: np.ndarray) -> np.ndarray:
    """The stream with each document once."""
    documents = dict.fromkeys(train.tobytes().split(b"\0"))
    return np.frombuffer(b"\0" + b"\0".join(document for document in documents if document) + b"\0", np.uint8)


def windows(stream: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every 64 bytes of a stream. uint8 [N] -> uint64 [N - 63]."""
    out = packed(stream, 8)
    for width in (8, 16, 32):
        out = (out[:-width] * np.uint64(0x9E3779B97F4A7C15)) ^ (out[width:] >> np.uint64(29)) ^ out[width:]
    return out


def shared_with(train: np.ndarray, documents: list[np.ndarray]) -> float:
    """Share of the documents' 64-byte substrings that the training text holds too."""
    pieces = [windows(document[1:]) for document in documents if document.size > 64]
    wanted, counts = np.unique(np.concatenate(pieces), return_counts=True)
    found = np.zeros(wanted.size, bool)
    hashes = windows(train)
    index = np.minimum(np.searchsorted(wanted, hashes), wanted.size - 1)
    found[index[wanted[index] == hashes]] = True
    return float(counts[found].sum() / counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", type=Path, help="a trained folder, to score after 4, 8, 16 and 32 loops")
    parser.add_argument("--documents", type=int, help="how many of the pages, in seed 0's order (all)")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if recipe.corpus is None:
        parser.error(f"recipe '{arguments.recipe}' has no corpus")
    corpus = build(recipe.corpus)
    benchmark: Benchmark = docs_benchmark()
    texts = [benchmark.document(document) for document in benchmark.sample(arguments.documents, 0)]  # type: ignore[attr-defined]
    documents = [np.frombuffer(b"\0" + text, np.uint8) for text in texts]
    size = sum(map(len, texts))
    packed_size = sum(len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in texts)
    distinct = once(corpus.train)
    result: dict[str, Any] = {
        "benchmark": {"name": "docs", "documents": len(texts), "bytes": size},
        "corpus": corpus.manifest | {"distinct_bytes": int(distinct.size)},
        "shared_64_byte_substrings": round(shared_with(distinct, documents), 4),
        "bits_per_byte": {
            "xz -9e per document": round(8 * packed_size / size, 4),
            **{
                f"{order}-gram, {label}": round(value, 4)
                for label, stream in (("as trained on", corpus.train), ("each document once", distinct))
                for order, value in ngram_bits(stream, documents, max(ORDERS)).items()
                if order in ORDERS
            },
        },
    }
    if arguments.model is not None:
        found = table(load_model(arguments.model), benchmark, arguments.documents, DEPTHS)
        by_depth = {f"{arguments.model.name}, {depth} loops": bits for depth, bits in zip(DEPTHS, found["all"], strict=True)}
        result["bits_per_byte"] |= by_depth
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
