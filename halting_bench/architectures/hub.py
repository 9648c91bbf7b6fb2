"""Checkpoints of the Hugging Face hub: fetched once into its cache, at a revision that is then written down."""

import re
from pathlib import Path

from halting_bench.errors import UserError

FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
"""`owner/name` or `owner/name@revision`."""


def is_hub_id(reference: str) -> bool:
    """Whether a reference has the form of a hub id."""
    return HUB_ID.fullmatch(reference) is not None


def fetch(reference: str, *, with_code: bool = False, endpoint: str | None = None) -> tuple[Path, str]:
    """The folder of a hub checkpoint, and the commit it is at.

    Args:
        reference: `owner/name`, or `owner/name@revision` (a branch, tag or commit).
        with_code: fetch Python files too (they are run only with --trust-remote-code).
        endpoint: another server than the hub's own.

    Raises:
        UserError: the repository or revision does not exist, is gated, or cannot be reached and is not in the cache.
    """
    from huggingface_hub import constants, errors, snapshot_download

    name, _, revision = reference.partition("@")
    try:
        folder = snapshot_download(
            name, revision=revision or None, allow_patterns=[*FILES, *(["*.py"] if with_code else [])], endpoint=endpoint
        )
    except errors.GatedRepoError:
        raise UserError(
            f"{name} is gated: accept its terms on its hub page, then run `hf auth login` (or set HF_TOKEN) and try again"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"the hub has no model {name}, or it is private: check the spelling, or run `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name} has no revision '{revision}': give a branch, tag or commit of it") from None
    except errors.HFValidationError:
        raise UserError(f"'{name}' is not a hub id: write owner/name or owner/name@revision") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise UserError(f"{reference} is not in the hub's cache, and HF_HUB_OFFLINE is set: unset it") from None
        line = " ".join(str(error).split())
        raise UserError(f"{reference} could not be fetched ({line[:200]}): check the network, or give a folder") from None
    return Path(folder), Path(folder).name
