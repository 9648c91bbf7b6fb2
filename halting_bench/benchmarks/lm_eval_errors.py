"""What lm-eval and the hub raise, as one line that says what to type. Imports neither."""

import difflib
from collections.abc import Iterable

from halting_bench.errors import UserError

LOCALIZE = "read local files with: halting-bench tasks localize TASK --data DIR"

_SUGGESTIONS = 3
_UNREACHABLE = {
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "MaxRetryError",
}


def unknown_task(name: str, known: Iterable[str]) -> UserError:
    """Of thousands of tasks only the nearest are worth listing."""
    near = difflib.get_close_matches(name, list(known), n=_SUGGESTIONS, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(f"unknown lm-eval task '{name}': {hint}type halting-bench tasks list, or give a YAML file")


def one_line(error: BaseException) -> str:
    """The first telling line of an exception and its causes, with the remedy where it is known."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    names = {type(e).__name__ for e in chain}
    if len(chain) > 1 and type(chain[0]).__name__ == "DatasetGenerationError":  # says nothing of its own
        del chain[0]
    text = " ".join(str(chain[0]).split())[:300] or type(chain[0]).__name__
    whole = " ".join(str(e) for e in chain)
    if names & {"GatedRepoError"} or "gated dataset" in whole:
        return f"{text}: accept the data set's terms on its hub page and run `hf auth login`, or {LOCALIZE}"
    if names & _UNREACHABLE or "offline" in whole.lower() or "Couldn't reach" in whole:
        return f"its data set cannot be had from the hub ({text}): check the network, or {LOCALIZE}"
    if names & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        return f"{text}: check dataset_path, or {LOCALIZE}"
    if names & {"FileNotFoundError"}:
        return f"{text}: give an existing file in data_files (an absolute path)"
    if "StopIteration" in names:
        return "its data has no rows: put at least one document into the file"
    if "DatasetGenerationError" in names:
        return f"its data cannot be read ({text}): mend the file"
    if "UndefinedError" in names:
        return f"{text}: name a column of its data in doc_to_text, doc_to_choice and doc_to_target"
    if isinstance(chain[0], KeyError):
        return f"its data has no {chain[0]}: name a split and columns that are there (test_split, doc_to_text, ...)"
    return text if type(chain[0]).__name__ in ("ValueError", "Exception") else f"{type(chain[0]).__name__}: {text}"
