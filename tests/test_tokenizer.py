"""Every tokenizer: exact round trips, nothing special in a text, the same after JSON; BPE against another implementation."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data.tokenizer import BPE, END, PATTERN, Bytes, Characters, Ids, from_dict, load, save, train_bpe

HARD = [
    "", "plain words, twice plain words.\n", "你好，世界。　全角", "👩‍👩‍👧‍👦 🏳️‍🌈 é é", "a\r\nb\r\n\r\nc\rd", "nul\0nul", "a" * 60,
    "tab\t\ttab    spaces   \n\n\n  indented", f"the string {END} appears here {END}", "ﷺ ﬁ 12345678 I'll they'RE", "\ufeffbom",
]  # fmt: skip
STDLIB = Path(sysconfig.get_paths()["stdlib"])


def source(*names: str) -> list[str]:
    return [(STDLIB / name).read_text(encoding="utf-8") for name in names]


TRAINED = train_bpe(source("argparse.py", "ast.py") + HARD, 700)
KINDS = [Characters("".join(HARD)), Bytes(), TRAINED]


@pytest.mark.parametrize("tokenizer", KINDS, ids=lambda t: t.kind)
@pytest.mark.parametrize("text", HARD)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode_array(text).tolist()
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode("utf-8")
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode("utf-8"))
    assert tokenizer.eot not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("tokenizer", KINDS, ids=lambda t: t.kind)
def test_end_of_text_is_special_only_in_prompts(tokenizer):
    ids = tokenizer.encode(f"a{END}b{END}", special=True)
    assert ids == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b"), tokenizer.eot]
    assert tokenizer.decode(ids) == f"a{END}b{END}"
    assert tokenizer.eot == tokenizer.vocab_size - 1 and tokenizer.token_bytes(tokenizer.eot) == b""


@pytest.mark.parametrize("tokenizer", [*KINDS, Ids(70_000)], ids=lambda t: t.kind)
def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    save(tokenizer, tmp_path / "tokenizer.json")
    again = load(tmp_path / "tokenizer.json")
    assert type(again) is type(tokenizer) and again.hash == tokenizer.hash and again.vocab_size == tokenizer.vocab_size
    assert from_dict(tokenizer.to_dict()).encode("12 3") == again.encode("12 3") == tokenizer.encode("12 3")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_hash_tells_tokenizers_apart():
    hashes = {t.hash for t in [*KINDS, Characters("ab"), Characters("ac"), Ids(5), Ids(6), BPE(TRAINED.ranks[:-1])]}
    assert len(hashes) == len(KINDS) + 5


def test_foreign_file_is_one_line(tmp_path):
    for text in ("not json", "[1]", '{"kind": "word"}', '{"kind": "bpe"}'):
        (tmp_path / "t.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError) as e:
            load(tmp_path / "t.json")
        assert "\n" not in str(e.value)


def test_unknown_characters_are_listed_on_one_line():
    tokenizer = Characters("nave 5")
    assert tokenizer.unknown("naïve 5 €ï\n") == ["ï", "€", "\n"]
    with pytest.raises(ValueError, match=r"lacks: ï € '\\n'$"):
        tokenizer.encode("naïve 5 €ï\n")
    with pytest.raises(ValueError, match="lacks"):   # beyond the greatest known code point, and half a pair
        tokenizer.encode("\U0010ffff\udcff")
    assert Bytes().unknown("€") == TRAINED.unknown("€") == []


@pytest.mark.parametrize("tokenizer", [*KINDS, Ids(9)], ids=lambda t: t.kind)
def test_an_id_outside_the_vocabulary_is_refused(tokenizer):
    for i in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.token_bytes(i)


def test_incomplete_utf8_decodes_with_replacement():
    ids = Bytes().encode("你")
    assert Bytes().decode(ids[:2]) == "\ufffd" and Bytes().decode(ids) == "你"
    assert Bytes().decode(np.array(ids)) == "你"


def test_ids_are_written_as_integers():
    tokenizer = Ids(100)
    assert tokenizer.encode(" 1 2\n99 ") == [1, 2, 99] and tokenizer.decode([1, 2, 99]) == "1 2 99" and tokenizer.eot is None
    for wrong in ("1 x", "100", "-1", "99999999999999999999999"):
        with pytest.raises(ValueError):
            tokenizer.encode(wrong)


def test_bpe_counts_end_of_text_and_says_how_many_there_are():
    assert train_bpe(source("ast.py"), 300).vocab_size == 300
    assert train_bpe(["abab"], 4096).vocab_size == len(train_bpe(["abab"], 4096).ranks) + 1 < 300
    assert train_bpe([], 4096).decode(train_bpe([], 4096).encode("你好\0")) == "你好\0"
    for small in (0, 255, 256):
        with pytest.raises(ValueError, match="at least 257"):
            train_bpe(["abab"], small)
    assert train_bpe(["abab"], 257).vocab_size == 257


def test_bpe_training_is_deterministic_and_bounded(monkeypatch):
    texts = source("argparse.py", "ast.py", "decimal.py")
    assert train_bpe(texts, 900).ranks == train_bpe(iter(texts), 900).ranks
    monkeypatch.setattr("data.tokenizer.TRAINING_CHARACTERS", len(texts[0]) + 7)
    assert train_bpe(texts, 900).ranks == train_bpe([texts[0], texts[1][:7]], 900).ranks


def test_long_runs_do_not_stop_bpe():
    for text in ("a" * 300_000, " " * 300_000, "\n" * 300_000, "^" * 300_000, "好" * 100_000):
        assert TRAINED.decode(TRAINED.encode(text)) == text


def oracle(texts: list[str], vocab_size: int):
    """Byte-level BPE of the `tokenizers` library with the same pattern."""
    tokenizers = pytest.importorskip("tokenizers", reason="the oracle, the tokenizers library, is not installed")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def to_unicode() -> dict[int, str]:
    """GPT-2's bytes as printable characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def test_bpe_encodes_as_the_tokenizers_library_does():
    """Our merges in their machine: the same ids for the same text."""
    tokenizers = pytest.importorskip("tokenizers", reason="the oracle, the tokenizers library, is not installed")
    table = to_unicode()
    words = ["".join(table[b] for b in token) for token in TRAINED.ranks]
    known = {token: i for i, token in enumerate(TRAINED.ranks)}
    merges = []
    for i, token in enumerate(TRAINED.ranks[256:], 256):   # the pair that made a token: what the earlier ranks make of it
        parts = BPE(TRAINED.ranks[:i]).encoding._encode_single_piece(token)
        merges.append(tuple(words[p] for p in parts))
        assert len(parts) == 2 and known[token] == i
    bpe = oracle(HARD, 300)
    bpe.model = tokenizers.models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges)
    for text in [*HARD, *source("heapq.py", "enum.py")]:
        assert bpe.encode(text).ids == TRAINED.encode(text)


@pytest.mark.slow
def test_bpe_trains_as_the_tokenizers_library_does():
    texts = [p.read_text(encoding="utf-8") for p in sorted((STDLIB / "asyncio").glob("*.py"))] + source("argparse.py", "ast.py")
    table = to_unicode()
    theirs = oracle(texts, 2000)
    ours = train_bpe(texts, 2001)
    tokens = {"".join(table[b] for b in token) for token in ours.ranks}
    assert len(tokens) == 2000
    assert len(tokens ^ set(theirs.get_vocab())) <= 20   # ties between equally frequent pairs are broken differently
    count = sum(len(ours.encode(t)) for t in texts)
    assert abs(sum(len(theirs.encode(t).ids) for t in texts) - count) <= count // 1000
