"""Documents, and their text in pieces that can be encoded one by one, split into training and validation."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PIECE = 1 << 20            # characters of text that are encoded at once
LONGEST = 16 * PIECE       # of a text without any place to cut
# Where a text may be cut: at the end of a match; the first pattern that matches anywhere counts. Between two letters and a
# space, or after a newline, every word of our BPE, cl100k_base and o200k_base ends (o200k_base takes a slash after newlines to
# the word before). GPT-2 gives the last of several spaces or newlines to what follows.
CUTS = (r"\n(?=[^\s/])", r"[A-Za-z](?= [A-Za-z])")
CUTS_GPT2 = (r"[\s\S](?=[ \n]\S)",)


class Document(NamedTuple):
    """key: what decides whether it is for validation ("": its text). chunks: its text, in pieces of any length."""

    key: str
    chunks: Iterable[str]


Documents = Callable[[], Iterable[Document]]   # called twice: a generator function
Piece = tuple[str, bool, str]                  # split, whether a document begins, text


@dataclass
class Survey:
    """What one reading of the documents tells."""

    hash: str                # sha256 of keys and texts
    documents: int           # that are not empty
    bytes: int               # of UTF-8
    sizes: array[int]        # bytes of each document
    places: array[int]       # of each document, empty ones too: 64 bits of the hash of its key
    low: int                 # least and greatest place of those that are not empty
    high: int


def survey(documents: Documents) -> Survey:
    """Read everything once. ValueError if there is no text."""
    whole, places, sizes, count, total, low, high = hashlib.sha256(), array("Q"), array("Q"), 0, 0, 1 << 64, -1
    for document in documents():
        text, size = hashlib.sha256(), 0
        for chunk in document.chunks:
            data = chunk.encode("utf-8")
            text.update(data)
            size += len(data)
        whole.update(f"{len(document.key.encode())} {document.key} {size} ".encode() + text.digest())
        key = hashlib.sha256(document.key.encode("utf-8")) if document.key else text
        place = int.from_bytes(key.digest()[:8], "big")
        places.append(place)
        sizes.append(size)
        if size:
            count, total, low, high = count + 1, total + size, min(low, place), max(high, place)
    if not count:
        raise ValueError("there is no text in the input: nothing to prepare")
    return Survey(whole.hexdigest(), count, total, sizes, places, low, high)


def cut(chunks: Iterable[str], size: int = PIECE, cuts: Sequence[str] = CUTS) -> Iterator[str]:
    """The same text in pieces of about `size` characters that BPE encodes as it does the whole: cut where one of `cuts`
    ends, in a text where none does after `LONGEST` characters."""
    rest = ""
    for chunk in (c[i : i + PIECE] for c in chunks for i in range(0, len(c), PIECE)):
        rest += chunk
        while len(rest) > size:
            at = _last_cut(rest, size, cuts)
            if at == 0 and len(rest) < LONGEST:
                break
            at = at or LONGEST
            yield rest[:at]
            rest = rest[at:]
    if rest:
        yield rest


def _last_cut(text: str, size: int, cuts: Sequence[str]) -> int:
    """The last good place to cut in the first `size` characters, else the first one after them; 0 if there is none."""
    for good in cuts:
        window = max(0, size - 65536)
        ends = [m.end() for m in re.finditer(good, text[window : size + 1])]
        if ends and ends[-1] + window <= size:
            return ends[-1] + window
        later = re.compile(good).search(text, window)
        if later:
            return later.end()
    return 0


def pieces(documents: Documents, found: Survey, val_fraction: float, cuts: Sequence[str] = CUTS) -> Iterator[Piece]:
    """(split, whether a document begins, text): whole documents by the hash of their key; a single one, or a few long ones of
    which not even one would be due to validation, by their ends."""
    few, long = found.documents * val_fraction < 1, found.bytes * val_fraction > 100 * found.documents
    if found.documents == 1 or (few and long):
        for size, document in zip(found.sizes, documents(), strict=True):
            yield from split_document(document.chunks, size, val_fraction, cuts)
        return
    if found.low == found.high:
        raise ValueError("all documents are the same: validation would be the training text")
    threshold = min(max(int(val_fraction * 2**64), found.low), found.high - 1)   # at least one document in each split
    for place, document in zip(found.places, documents(), strict=True):
        split, new = ("val" if place <= threshold else "train"), True
        for text in cut(document.chunks, cuts=cuts):
            yield split, new, text
            new = False


def split_document(chunks: Iterable[str], size: int, val_fraction: float, cuts: Sequence[str] = CUTS) -> Iterator[Piece]:
    """One document of `size` UTF-8 bytes: the first 1 - val_fraction of them for training, the rest for validation."""
    left, split, new = int(size * (1 - val_fraction)), "train", True
    for text in cut(chunks, cuts=cuts):
        data = text.encode("utf-8")
        if split == "train" and len(data) > left:
            while left and data[left] & 0xC0 == 0x80:   # back to the beginning of a character
                left -= 1
            if left:
                yield split, new, data[:left].decode("utf-8")
            split, new, text = "val", True, data[left:].decode("utf-8")
        left -= len(data)
        yield split, new, text
        new = False
