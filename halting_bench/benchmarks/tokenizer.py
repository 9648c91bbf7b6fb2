"""From text to token ids and back: the checkpoint's own tokenizer, or bytes when it has none."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from halting_bench.architectures.files import checked_file, read_json
from halting_bench.benchmarks.text import BYTES, Encoding, Tokens
from halting_bench.errors import UserError

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", SETTINGS)
BYTE_VALUES = 256


class Tokenizer(ABC):
    """Turns text into ids below a model's vocabulary size."""

    end: int | None = None  # the id that ends a generated text; None: there is none

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of ids."""

    @abstractmethod
    def encoding(self) -> Encoding:
        """How a text benchmark reads with it. Raises UserError when no token is there to begin a document with."""


class ByteTokenizer(Tokenizer):
    """A token a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < BYTE_VALUES).decode("utf-8", errors="replace")  # a vocabulary may be padded

    def encoding(self) -> Encoding:
        return BYTES


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: Path, start: int | str | None, end: int | str | None = None):
        """
        Args:
            path: of the file.
            start: id or text of the token before the first of a document.
            end: id or text of the token that ends a generated text.

        Raises:
            UserError: the file is missing, empty, broken, or a link out of its folder.
        """
        from tokenizers import Tokenizer as Backend

        content = checked_file(path.parent, path.name).read_bytes()
        try:
            self._backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"{path} is not a tokenizer ({str(error)[:120]}): download it again") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.path = path
        self.name = f"{FILE}:{hashlib.sha256(content).hexdigest()[:16]}"
        self.start = self._backend.token_to_id(start) if isinstance(start, str) else start
        self.end = self._backend.token_to_id(end) if isinstance(end, str) else end

    @property
    def size(self) -> int:
        """One more than the largest id it can give."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def encoding(self) -> Encoding:
        if self.start is None:
            raise UserError(f"{self.path} has no token to begin a document with: name one as bos_token in {SETTINGS}")
        return Encoding(self.name, self.start, self._tokens)

    def _tokens(self, text: bytes) -> Tokens:
        """Ids, and the bytes that each stands for: from its first one to the next token's, so that none is lost."""
        string = text.decode("utf-8")
        found = self._backend.encode(string, add_special_tokens=False)
        byte_at = np.concatenate(([0], np.cumsum([len(character.encode("utf-8")) for character in string], dtype=np.int64)))
        starts = np.maximum.accumulate(byte_at[[start for start, _ in found.offsets]]) if found.ids else np.zeros(0, np.int64)
        starts[:1] = 0
        return Tokens(np.array(found.ids, np.int64), np.diff(starts, append=len(text))[: len(starts)])


def load_tokenizer(folder: Path | None, config: Mapping[str, object], vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        folder: of the checkpoint; None: a class of the user's, which has none.
        config: the parsed config.json.
        vocab_size: of the model.

    Raises:
        UserError: the folder has a tokenizer of a kind that is not read, one that does not fit the model, or none while
            the model's vocabulary is not one of bytes.
    """
    if folder is not None and ((folder / FILE).exists() or (folder / FILE).is_symlink()):
        tokenizer = FileTokenizer(
            folder / FILE, _special(folder, config, "bos_token", "eos_token"), _special(folder, config, "eos_token")
        )
        if tokenizer.size > vocab_size:
            raise UserError(
                f"{folder / FILE} gives ids up to {tokenizer.size - 1}, the model knows {vocab_size}: "
                "it belongs to another model; get the one that came with the weights"
            )
        return tokenizer
    where = folder or "the model"
    others = [name for name in OTHER_FORMS if folder is not None and (folder / name).exists()]
    if others:
        raise UserError(f"{where} has {others[0]} but no {FILE}: convert it (transformers: save_pretrained writes one)")
    if not BYTE_VALUES <= vocab_size < 2 * BYTE_VALUES:
        raise UserError(f"{where} has no {FILE}, and {vocab_size} ids are not bytes: put {FILE} there")
    return ByteTokenizer()


def _special(folder: Path, config: Mapping[str, object], *keys: str) -> int | str | None:
    """The first of these special tokens that the tokenizer's settings or the model's config names."""
    settings = read_json(checked_file(folder, SETTINGS)) if (folder / SETTINGS).exists() else {}
    for key in keys:
        named = settings.get(key)
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str):
            return token
        number = config.get(f"{key}_id")
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return None
