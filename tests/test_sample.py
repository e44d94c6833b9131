"""Generation: the cache changes nothing, rows do not meet, text streams whole."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, tiny, tokens, words

from config import TrainConfig
from data.tokenizer import Bytes, Characters, train_bpe
from engine.checkpoint import find_step
from engine.generate import Text, generate, probabilities
from train import train


def written(model, prompts, n, **kw) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in prompts]
    for ids in generate(model, prompts, n, **kw):
        for row, i in ids.items():
            out[row].append(i)
    return out


def recomputed(model, prompt, n) -> list[int]:
    """Greedy, without a cache, the whole text at every step."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt):]


PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (3, 17, 40, 1)]


@torch.no_grad()
@pytest.mark.parametrize("word", words())
def test_greedy_text_is_the_same_with_and_without_cache_alone_and_in_a_batch(word):
    """C10, P58, P65; a row that stops early changes nothing for the others."""
    model = tiny(layers=word, tie_embeddings=False)     # tied and untrained, it would repeat its input for ever
    want = [recomputed(model, p, 60) for p in PROMPTS]
    assert sum(len(set(text)) for text in want) > 20
    assert written(model, PROMPTS, 60, temperature=0) == want == [written(model, [p], 60, temperature=0)[0] for p in PROMPTS]
    assert written(model, PROMPTS[::-1], 60, temperature=0) == want[::-1]
    got = written(model, PROMPTS, 60, temperature=0, stop_ids=[want[1][5]])
    for row, text in enumerate(want):
        end = text.index(want[1][5]) + 1 if want[1][5] in text else 60
        assert got[row] == text[:end]


def test_a_sampled_row_depends_on_its_seed_and_place_alone():
    model = tiny()
    a = written(model, [PROMPTS[0]] * 3, 40, seed=1)
    assert a[0] != a[1] and a == written(model, [PROMPTS[0]] * 3, 40, seed=1) and a != written(model, [PROMPTS[0]] * 3, 40, seed=2)
    assert written(model, [PROMPTS[0], PROMPTS[2], PROMPTS[1]], 40, seed=1)[0] == a[0]
    assert written(model, [PROMPTS[0]], 40, seed=1, first_row=2)[0] == a[2]
    ended = written(model, [PROMPTS[0]] * 3, 40, seed=1, ends=lambda row: row == 1)
    assert ended[0] == a[0] and len(ended[1]) == 1 and ended[2] == a[2]


def test_temperature_zero_is_greedy_for_every_seed_and_nearly_zero_is_near():
    model = tiny(tie_embeddings=False)
    greedy = written(model, PROMPTS, 30, temperature=0, seed=1)
    for other in (dict(temperature=0, seed=2), dict(temperature=1e-6), dict(temperature=1e-45)):
        assert written(model, PROMPTS, 30, **other) == greedy


def test_filters_are_their_definitions():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    p = logits.softmax(-1)[0]
    kept = lambda **kw: (probabilities(logits, **kw)[0] > 0).tolist()
    torch.testing.assert_close(probabilities(logits, 0.5)[0], (logits / 0.5).softmax(-1)[0])
    assert kept(top_k=2) == [True, True, False, False, False] and kept(top_k=99) == [True] * 5
    assert kept(top_p=float(p[0]) - 0.01) == [True] + [False] * 4
    assert kept(top_p=float(p[0]) + 0.01) == [True, True] + [False] * 3 and kept(top_p=1.0) == [True] * 5
    assert kept(min_p=float(p[2] / p[0]) - 0.01) == [True, True, True, False, False]
    torch.testing.assert_close(probabilities(logits, top_k=3).sum(-1), torch.ones(1))
    assert kept(temperature=1e-6) == [True] + [False] * 4


def test_draws_follow_the_probabilities():
    model = tiny()
    want = torch.softmax(model(torch.tensor([PROMPTS[0]]))[0, -1] / 1.5, -1)
    seen = Counter(text[0] for text in written(model, [PROMPTS[0]] * 4000, 1, temperature=1.5))
    got = torch.tensor([seen[i] / 4000 for i in range(65)])
    assert (got - want).abs().max() < 4 * (want * (1 - want) / 4000).sqrt().max()


def test_padding_ids_of_the_vocabulary_are_never_drawn():
    model = tiny(vocab_size=128)
    texts = written(model, PROMPTS * 5, 50, temperature=5.0, vocab_size=65)
    assert max(max(t) for t in texts) < 65
    assert max(written(model, PROMPTS, 50, temperature=0, vocab_size=10)[0]) < 10


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("n", [63, 64, 65, 200])
def test_text_longer_than_the_context_goes_on(position, n):
    """P59, P66: up to block_size tokens equal the recomputed ones; then the last half is the context; never an error."""
    model = tiny(block_size=64, position=position, tie_embeddings=False)
    prompt = tokens(1, n)[0].tolist()
    got = written(model, [prompt, PROMPTS[0]], 150, temperature=0)
    assert [len(t) for t in got] == [150, 150]
    free = 64 - min(n, 64) + 1
    assert got[0][:free] == recomputed(model, prompt[-64:], free)
    alone = [*PROMPTS[0], *written(model, [PROMPTS[0]], 150, temperature=0)[0]]
    assert got[1] == alone[3:] and len(set(alone)) > 3
    assert alone[3:3 + 62] == recomputed(model, PROMPTS[0], 62)
    assert alone[65:65 + 20] == recomputed(model, alone[65 - 32:65], 20)


BPE = train_bpe(["你好😀 naïve the cat sat on the mat " * 50], 300)


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE, Characters("你好😀 naïvethcsom")], ids=["byte", "bpe", "char"])
def test_streamed_text_is_the_decoded_text_in_whole_characters(tokenizer):
    """P84."""
    for text in ("你好😀 naïve the cat", "😀", ""):
        ids, stream = tokenizer.encode(text), Text(tokenizer)
        shown = [stream.push(i) for i in ids] + [stream.end()]
        assert "".join(shown) == tokenizer.decode(ids) == text and "\ufffd" not in "".join(shown)
    broken, stream = "😀".encode()[:3], Text(Bytes())
    assert "".join(stream.push(i) for i in broken) == "" and stream.end() == "\ufffd" == Bytes().decode(broken)


def test_a_stop_text_may_span_tokens_and_is_not_shown():
    def shown(text, *stop):
        stream, out = Text(Bytes(), stop), ""
        for i in text.encode():
            out += stream.push(i)
            if stream.done:
                return out
        return out + stream.end()

    assert shown("one\n\ntwo", "\n\n") == "one" and shown("one\ntwo\n", "\n\n") == "one\ntwo\n" and shown("aab", "ab", "zz") == "a"
    assert shown("ababac", "abac") == "ab" and shown("xyz", "z", "yz") == "x"
    stream = Text(Bytes())
    assert stream.push(Bytes().eot) == "" and stream.done


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A folder with out/old and out/new, trained a little."""
    home = tmp_path_factory.mktemp("home")
    config = TrainConfig(dataset=str(corpus), n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=4, max_iters=300, eval_iters=1, device="cpu", dtype="float32", learning_rate=1e-2)
    for name in ("old", "new"):
        train(replace(config, out_dir=str(home / "out" / name)))
    return home


def sample(run, *argv, stdin=None, **kw):
    kw = {"stdin": subprocess.DEVNULL, **kw} if stdin is None else {"input": stdin, **kw}
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *argv], capture_output=True, cwd=run, timeout=100, encoding="utf-8", **kw)


def test_the_newest_run_is_taken_and_named(run):
    out = sample(run, "--prompt", "ba", "--max_new_tokens=30", "--num_samples=2")
    assert out.returncode == 0, out.stderr
    assert out.stderr.splitlines()[0].startswith(str(find_step(run / "out" / "new").relative_to(run)))
    assert "step 300, validation loss " in out.stderr
    first, second = out.stdout[:-1].split("\n---------------\n")
    assert first.startswith("ba") and second.startswith("ba") and len(first) == len(second) == 32 and first != second
    assert sample(run, "--prompt", "ba", "--max_new_tokens=30", "--num_samples=2").stdout == out.stdout
    assert sample(run, "--prompt", "ba", "--max_new_tokens=30", "--checkpoint=out/old").stderr.startswith("out/old/")


def test_more_texts_than_fit_side_by_side_are_all_different(run):
    texts = sample(run, "--prompt", "ba", "--max_new_tokens=30", "--num_samples=70").stdout[:-1].split("\n---------------\n")
    assert len(texts) == 70 == len(set(texts))


def test_prompts_from_a_file_and_from_standard_input(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ba\n\nsome of\n", encoding="utf-8-sig")
    texts = sample(run, "--prompt_file", str(file), "--max_new_tokens=10", "--temperature=0").stdout[:-1].split("\n---------------\n")
    assert len(texts) == 3 and texts[0].startswith("ba") and texts[2].startswith("some of")
    for text, prompt in zip(texts, ("ba", "", "some of")):
        assert sample(run, "--prompt", prompt, "--max_new_tokens=10", "--temperature=0").stdout[:-1] == text
    assert sample(run, "--max_new_tokens=10", "--temperature=0", stdin="ba").stdout[:-1] == texts[0]
    assert sample(run, "--prompt=-", "--max_new_tokens=10", "--temperature=0", stdin="ba").stdout[:-1] == texts[0]


@pytest.mark.parametrize("argv, message", [
    (["--prompt", "naïve 5 €"], "the vocabulary lacks 'ï' 'v' '5' '€'"), (["--checkpoint", "nowhere"], "no checkpoint in nowhere"), (["--temperature=-1"], "must be at least 0"),
    (["--top_p=2"], "at most 1"), (["--prompt_file", "nowhere.txt"], "there is no file nowhere.txt"), (["--device=cuda:9"], "not on this machine"), (["ba"], "unexpected 'ba'"),
    (["--prompt=a", "--prompt_file=b"], "not both"),
])
def test_mistakes_are_one_line(run, argv, message):
    out = sample(run, *argv)
    assert out.returncode == 2 and message in out.stderr and "Traceback" not in out.stderr, out.stderr
    assert out.stderr.splitlines()[-1].startswith("error: ") and out.stdout == ""


def test_without_a_run_it_says_what_to_do(tmp_path):
    out = sample(tmp_path)
    assert out.returncode == 2 and out.stderr == "error: no checkpoint in out/: train one first, for example python train.py config/demo.py\n"


def test_text_comes_as_it_is_produced_and_a_closed_pipe_is_no_error(run):
    p = subprocess.Popen([sys.executable, str(ROOT / "sample.py"), "--max_new_tokens=100000", "--prompt=ba"], cwd=run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert p.stdout.read(40).startswith("ba")          # long before it ends
    p.stdout.close()
    assert p.wait(timeout=60) == 0 and "Traceback" not in p.stderr.read()


def test_a_silent_pipe_does_not_block(run):
    p = subprocess.Popen([sys.executable, str(ROOT / "sample.py"), "--max_new_tokens=5"], cwd=run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert p.wait(timeout=60) == 0


def test_standard_output_takes_any_character_under_any_locale(run, tmp_path):
    from data.build import build
    from data.documents import Document
    folder = build(tmp_path / "russian", lambda: [Document("", ["Привет 你好 😀\n" * 500])], "char")
    train(TrainConfig(dataset=str(folder), n_layer=1, n_head=1, n_embd=16, block_size=16, batch_size=4, max_iters=60, eval_iters=1, device="cpu", out_dir=str(tmp_path / "out" / "r"), learning_rate=1e-2))
    out = sample(tmp_path, "--prompt=Привет", "--max_new_tokens=40", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PATH": ""})
    assert out.returncode == 0 and "😀" in out.stdout, out.stderr


def test_the_tokenizer_travels_in_the_checkpoint(run, corpus):
    """P19: nothing but the run's folder is read."""
    import shutil
    alone = run / "elsewhere"
    shutil.copytree(run / "out" / "new", alone / "new")
    assert sample(run, "--checkpoint", str(alone), "--max_new_tokens=5").returncode == 0


def test_words_of_a_sample_are_counted():
    from tools.demo import known_share, words
    assert words("O' the king's Héros, 3 x's_y") == ["o", "the", "king's", "héros", "x's", "y"]
    assert known_share(["The king xq ki"], {"the", "king", "ki"}) == pytest.approx(2 / 3)
    assert known_share([""], {"a"}) == 0
