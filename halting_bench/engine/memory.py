"""Running out of memory: recognised on every device, answered with half the rows, and said."""

import gc
import logging

import torch

logger = logging.getLogger("halting_bench")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def halve(rows: int, what: str) -> int:
    """Half the rows, after freeing what the failed attempt held; says so."""
    fewer = rows // 2
    logger.warning("out of memory with %d %s: going on with %d", rows, what, fewer)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fewer
