"""Ids on disk come back as they were or not at all; the loader shows every window once, whatever the number of ranks."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

from data.find import find
from data.loader import FixedWindows, Loader, permuted
from data.shards import UNFINISHED, Corpus, ShardWriter, Split, top_id, width
from data.tokenizer import Bytes, save


def shard(folder, ids, vocab_size=256, name="train", shard_tokens=100_000_000):
    """A split of these ids."""
    writer = ShardWriter(folder, name, vocab_size, shard_tokens)
    writer.write(np.asarray(ids))
    writer.close()
    return Split(folder, name)


# --- ids on disk


@pytest.mark.parametrize("vocab", [65, 50257, 65536, 65537, 100277])
def test_ids_survive_the_disk_up_to_the_top_one(tmp_path, vocab):
    ids = np.random.default_rng(0).integers(0, vocab, 5000)
    ids[[0, 17, -1]] = vocab - 1
    split = shard(tmp_path, ids, vocab)
    assert (split.read(0, 5000) == ids).all() and split.read(0, 1).dtype == np.int64
    header = np.fromfile(tmp_path / "train_000000.bin", "<i4", 3).tolist()
    assert header == ([20240520, 1, 5000] if vocab <= 65536 else [20240801, 7, 5000])
    assert (tmp_path / "train_000000.bin").stat().st_size == 1024 + 5000 * width(vocab).itemsize


@pytest.mark.parametrize("bad", [-1, 65, 65537])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path, bad):
    writer = ShardWriter(tmp_path, "train", 65)
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 65"):
        writer.write(np.array([1, bad, 2]))
    assert not list(tmp_path.iterdir())


def test_reads_cross_shards(tmp_path):
    split = shard(tmp_path, np.arange(1000) % 251, shard_tokens=64)
    assert len(list(tmp_path.glob("train_*.bin"))) == 16 and len(split) == 1000
    for start, n in ((0, 1000), (63, 2), (64, 64), (60, 200), (999, 1), (1000, 0)):
        assert (split.read(start, n) == np.arange(start, start + n) % 251).all()
    for start, n in ((-1, 1), (0, 1001), (1000, 1)):
        with pytest.raises(ValueError, match="outside the split"):
            split.read(start, n)


def test_a_shard_exists_only_when_it_is_whole(tmp_path):
    writer = ShardWriter(tmp_path, "train", 256)
    writer.write(np.arange(100))
    assert not list(tmp_path.glob("*.bin"))
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["train_000000.bin"]


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "train_000000.bin"
    shard(tmp_path, np.arange(100), 70_000)
    whole = path.read_bytes()
    for data, why in (
        (whole[:-1], "cut short"),
        (whole + b"\0\0\0\0", "damaged"),
        (whole[:700], "cut short"),
        (b"", "does not begin"),
        (b"\0" * 2000, "does not begin"),
        (whole[:4] + b"\5" + whole[5:], "version 5"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=why) as e:
            Split(tmp_path, "train")
        assert "\n" not in str(e.value) and path.name in str(e.value)


def corpus(folder, ids, vocab_size, **changes):
    shard(folder, ids, vocab_size)
    shard(folder, ids[:50], vocab_size, "val")
    meta = {"vocab_size": vocab_size, "dtype": str(width(vocab_size)), "tokens": {"train": len(ids), "val": 50}} | changes
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return Corpus(folder)


def test_a_corpus_whose_files_disagree_is_refused(tmp_path):
    ids = np.arange(70_000)
    assert corpus(tmp_path, ids, 70_000).split("train").read(69_999, 1) == 69_999
    with pytest.raises(ValueError, match=r"uint16.*uint32"):   # four bytes are never taken for two ids of two
        corpus(tmp_path, ids, 70_000, dtype="uint16").split("train")
    with pytest.raises(ValueError, match="69999 tokens"):
        corpus(tmp_path, ids, 70_000, tokens={"train": 69_999}).split("train")
    save(Bytes(), tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="not the one that made the tokens"):
        corpus(tmp_path, ids, 70_000, tokenizer={"kind": "byte", "hash": "0"})
    (tmp_path / "meta.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="no JSON"):
        Corpus(tmp_path)


def test_a_missing_or_unfinished_corpus_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        Corpus(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no finished corpus"):
        Corpus(tmp_path)
    shard(tmp_path, np.arange(100))
    (tmp_path / UNFINISHED).mkdir()
    with pytest.raises(FileNotFoundError, match="no finished corpus"):
        Corpus(tmp_path)
    with pytest.raises(FileNotFoundError, match="no split 'test'"):
        Split(tmp_path, "test")


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


def test_nanogpts_folder_is_read_without_its_pickle(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(20, dtype="<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    found = Corpus(tmp_path)
    assert found.tokenizer.kind == "ids" and found.vocab_size == 300
    assert found.split("train").read(298, 2).tolist() == [298, 299] and len(found.split("val")) == 20
    (tmp_path / "meta.json").write_text('{"vocab_size": 1000}', encoding="utf-8")
    assert Corpus(tmp_path).vocab_size == 1000
    (tmp_path / "meta.json").write_text('{"vocab_size": 1000, "dtype": "uint32"}', encoding="utf-8")
    with pytest.raises(ValueError, match="uint32"):
        Corpus(tmp_path).split("train")
    (tmp_path / "val.bin").write_bytes(b"\0\0\0")
    with pytest.raises(ValueError, match="multiple of 2"):
        Split(tmp_path, "val")


def foreign(folder, name, ids, vocab_size):
    """A shard as llm.c and modded-nanogpt name theirs, without meta.json."""
    shard(folder, ids, vocab_size)
    (folder / "train_000000.bin").rename(folder / name)


@pytest.mark.parametrize("names", [("fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"),
                                   ("fineweb_train_000001.bin", "fineweb_train_000002.bin"), ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin")])
def test_llm_c_shards_are_gpt2s_ids(tmp_path, names):
    for k, name in enumerate(names):
        foreign(tmp_path, name, np.arange(10) + 10 * k, 50257)
    found = find(str(tmp_path))
    train = [n for n in names if "train" in n]
    assert (found.vocab_size, found.tokenizer.eot) == (50257, 50256) and found.split("train").read(0, 10 * len(train)).tolist() == list(range(10 * len(train)))
    assert len(found.split("val")) == 10 if len(names) > len(train) else True


def test_llm_c_shards_of_other_vocabularies(tmp_path):
    (tmp_path / "llama").mkdir()
    foreign(tmp_path / "llama", "x_train_000000.bin", np.arange(90_000, 90_010), 128256)
    assert Corpus(tmp_path / "llama").vocab_size == 128256
    foreign(tmp_path, "x_train_000000.bin", np.array([1, 60_000, 2]), 65536)
    assert Corpus(tmp_path).vocab_size == 60_001                   # not GPT-2's: counted
    (tmp_path / "meta.json").write_text('{"vocab_size": 65536}', encoding="utf-8")
    assert Corpus(tmp_path).vocab_size == 65536


def test_a_large_foreign_folder_opens_at_once_and_refuses_at_reading(tmp_path, monkeypatch):
    ids = np.zeros(70_000_000, dtype="<u2")
    ids[5_000_001] = 50_257                                        # between the samples
    for name, header in (("fineweb_train_000001.bin", True), ("train.bin", False)):
        folder = tmp_path / name
        folder.mkdir()
        with open(folder / name, "wb") as f:
            f.write(np.array([20240520, 1, len(ids), *[0] * 253], dtype="<i4").tobytes() if header else b"")
            ids.tofile(f)
        with monkeypatch.context() as patch:
            patch.setattr("data.shards.top_id", lambda splits, samples=0: top_id(splits, samples) if samples else pytest.fail("reads everything"))
            found = Corpus(folder)
        assert found.vocab_size == 50257
        split = found.split("train")
        assert split.read(5_000_002, 1000).max() == 0
        with pytest.raises(ValueError, match="holds the id 50257, outside its vocabulary of 50257.*meta.json"):
            split.read(5_000_000, 1000)


def test_empty_and_many_shards(tmp_path):
    sizes = [0, 3, 0, 0, 5, *[1] * 3000, 0]
    ids = np.arange(sum(sizes)) % 251
    for k, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        with open(tmp_path / f"train_{k:06d}.bin", "wb") as f:
            f.write(np.array([20240520, 1, len(part), *[0] * 253], dtype="<i4").tobytes() + part.astype("<u2").tobytes())
    split = Split(tmp_path, "train")
    assert len(split) == 3008 and (split.read(0, 3008) == ids).all() and split.read(3008, 0).tolist() == []
    for start, n in ((2, 2), (3, 1), (7, 3), (3007, 1)):
        assert (split.read(start, n) == ids[start : start + n]).all()


# --- the loader


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 64, 1000, 4097])
def test_permuted_is_a_permutation(n):
    for seed in range(3):
        assert sorted(permuted(i, n, (seed, 7, 8, 9)) for i in range(n)) == list(range(n))


def test_permuted_mixes():
    places = np.array([permuted(i, 10_000, (1, 2, 3, 4)) for i in range(10_000)])
    assert abs(np.corrcoef(places, np.arange(10_000))[0, 1]) < 0.05
    assert (np.abs(np.diff(places)) < 100).mean() < 0.05   # 2 % by chance
    assert (places != [permuted(i, 10_000, (1, 2, 3, 5)) for i in range(10_000)]).mean() > 0.99


def windows(loader, steps):
    return [tuple(row) for step in steps for row in loader.batch(step).tolist()]


def test_an_epoch_shows_every_window_once(tmp_path):
    split = shard(tmp_path, np.arange(1003), 1003, shard_tokens=100)
    loader = Loader(split, 10, 5, seed=1)
    assert loader.windows == 100
    starts = []
    for epoch in range(6):
        rows = windows(loader, range(20 * epoch, 20 * epoch + 20))
        assert all(row == tuple(range(row[0], row[0] + 11)) for row in rows)
        first = min(row[0] for row in rows)
        assert sorted(row[0] for row in rows) == list(range(first, first + 1000, 10)) and first <= 2
        starts.append([row[0] for row in rows])
    assert len({tuple(s) for s in starts}) == 6                    # another order each epoch
    assert len({min(s) for s in starts}) > 1                       # and another grid
    assert starts[0] != sorted(starts[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_what_one_sees(tmp_path, ranks):
    split = shard(tmp_path, np.arange(5000), 5000)
    one = Loader(split, 16, 8, seed=3)
    many = [Loader(split, 16, 8, seed=3, rank=r, ranks=ranks) for r in range(ranks)]
    for step in (0, 1, 38, 39, 40, 200):
        parts = [loader.batch(step) for loader in many]
        assert all(part.shape == (8 // ranks, 17) and part.dtype == torch.int64 for part in parts)
        assert torch.equal(torch.cat(parts), one.batch(step))
    seen = [set(windows(loader, range(39))) for loader in many]   # 312 windows, 39 whole steps
    assert sum(map(len, seen)) == len(set.union(*seen)) == 312


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    split = shard(tmp_path, np.arange(5000), 5000)
    loader = Loader(split, 16, 8, seed=3)
    later = loader.batch(77)
    for step in (5, 0, 400):
        loader.batch(step)
    assert torch.equal(Loader(split, 16, 8, seed=3).batch(77), later)
    assert not torch.equal(Loader(split, 16, 8, seed=4).batch(77), later)
    assert loader.batch(2**40).shape == (8, 17)


def test_an_epoch_ends_inside_a_batch(tmp_path):
    loader = Loader(shard(tmp_path, np.arange(71), 71), 10, 4, seed=0)   # 7 windows, 4 rows
    rows = windows(loader, range(7))
    for epoch in range(4):
        assert len({row[0] for row in rows[7 * epoch : 7 * epoch + 7]}) == 7


def test_one_window_is_enough_and_less_is_refused(tmp_path):
    split = shard(tmp_path, np.arange(33))
    assert Loader(split, 32, 2, seed=0).batch(9).tolist() == [list(range(33))] * 2
    assert [x.shape for x, _ in FixedWindows(split, 32, 2, batches=3)] == [(1, 32)]
    for make in (lambda: Loader(split, 33, 2, seed=0), lambda: FixedWindows(split, 33, 2, batches=1)):
        with pytest.raises(ValueError, match=r"'train'.* 33 tokens.*block_size is 33.*34") as e:
            make()
        assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="do not divide"):
        Loader(split, 8, 3, seed=0, ranks=2)
    with pytest.raises(ValueError, match="at least 2"):
        FixedWindows(shard(tmp_path, [1], name="one"), 8, 1)


# --- fixed windows


@pytest.mark.parametrize("n", [2, 8, 9, 10, 80, 81, 100])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_fixed_windows_predict_every_token_but_the_first_once(tmp_path, n, rows):
    fixed = FixedWindows(shard(tmp_path, np.arange(n) + 1), 8, rows)
    batches = list(fixed)
    assert len(batches) == len(fixed)
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    assert x.shape == y.shape == (-(-(n - 1) // 8), 8) and x.dtype == y.dtype == torch.int64
    assert y[y != -1].tolist() == list(range(2, n + 1)) and x[y != -1].tolist() == list(range(1, n))
    assert (x[y == -1] == 0).all()


def test_some_fixed_windows_are_spread_evenly_and_always_the_same(tmp_path):
    split = shard(tmp_path, np.arange(1001), 1001)
    fixed = FixedWindows(split, 10, 4, batches=5)
    batches, again = list(fixed), list(fixed)
    assert len(batches) == len(fixed) == 5 and all(x.shape == (4, 10) for x, _ in batches)
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(batches, again))
    starts = torch.cat([x[:, 0] for x, _ in batches]).tolist()
    assert starts == list(range(0, 1000, 50)) and all(torch.equal(y, x + 1) for x, y in batches)
    few = torch.cat([x for x, _ in FixedWindows(split, 10, 4, batches=999)])   # more than there are: each once
    assert few.shape == (100, 10) and few[:, 0].unique().numel() == 100
