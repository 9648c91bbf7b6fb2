"""What kind of byte a target is: the `class` subset of the text benchmarks."""

import string

import numpy as np

CLASS_NAMES = ("whitespace", "punctuation", "digits", "letters", "other")
"""`other` is what ASCII does not print: control bytes, and every byte of a multi-byte UTF-8 character."""

_MEMBERS = (string.whitespace, string.punctuation, string.digits, string.ascii_letters)


def _class_table() -> np.ndarray:
    table = np.full(256, CLASS_NAMES.index("other"), dtype=np.int16)
    for code, members in enumerate(_MEMBERS):
        table[list(members.encode())] = code
    return table


_TABLE = _class_table()


def class_codes(values: np.ndarray) -> np.ndarray:
    """The class of each byte. values: uint8 [N]. Returns int16 [N], indices into `CLASS_NAMES`."""
    return _TABLE[values]
