"""Generation: the cache changes nothing, rows do not meet, text streams whole."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, tiny, tokens, words

from config import TrainConfig
from data.tokenizer import Bytes, Characters, train_bpe
from engine import generate as generation
from engine.checkpoint import find_step
from engine.generate import Batch, Options, Text, adjusted, generate, probabilities
from mixers import MIXERS
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


@torch.no_grad()
@pytest.mark.parametrize("word", [*MIXERS, "gated_deltanet attention"])
def test_rows_that_wait_join_as_others_leave_and_each_is_as_alone(word):
    """Two side by side of nine, of all lengths, some ended from outside, some beyond the context; sampled by their own seeds."""
    model = tiny(layers=word, block_size=48, tie_embeddings=False)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 17, 40, 1, 60, 2, 9, 5, 31)]
    options = [Options(temperature=0.0 if i % 2 else 1.0, max_new_tokens=4 + 7 * (i % 4)) for i in range(9)]

    def texts(rows, width, dropped=()):
        batch, out = Batch(model, width), {i: [] for i in rows}
        for i in rows:
            batch.add(i, prompts[i], options[i], seed=i)
        while drawn := batch.step():
            assert len(drawn) <= width
            for d in drawn:
                out[d.key].append(d.id)
                if d.key in dropped and len(out[d.key]) == 3:
                    batch.drop(d.key)
        return out

    want = {i: texts([i], 1)[i] for i in range(9)}
    assert [len(t) for t in want.values()] == [o.max_new_tokens for o in options]
    assert texts(range(9), 2) == want == texts(range(8, -1, -1), 4)
    got = texts(range(9), 3, dropped=(1, 7))
    assert got == {i: t[:3] if i in (1, 7) else t for i, t in want.items()}


def test_no_tokens_asked_for_are_none():
    assert written(tiny(), [[1, 2], [3]], 0) == [[], []]


def test_what_is_dropped_while_it_waits_never_comes():
    batch = Batch(tiny(), 1)
    for i in range(3):
        batch.add(i, [1, 2], Options(max_new_tokens=2), i)
    batch.drop(1)
    assert [d.key for _ in range(9) for d in batch.step()] == [0, 0, 2, 2]


@torch.no_grad()
@pytest.mark.parametrize("word", ["attention", "attention(window=7) mamba2", "hierarchical", "rwkv7"])
def test_a_text_that_goes_on_is_the_text_read_whole(word, monkeypatch):
    """From its cache, also by pieces, and beyond the context."""
    monkeypatch.setattr(generation, "PIECE", 4)
    model = tiny(layers=word, block_size=64, tie_embeddings=False)
    batch, text = Batch(model), [5, 6, 7]
    batch.add(0, text, Options(temperature=0.0, max_new_tokens=8), 0)
    for turn in range(3):
        new = [d.id for _ in range(8) for d in batch.step()]
        assert new == recomputed(model, text, 8)
        more = tokens(1, 9, seed=turn)[0].tolist() if turn else []
        batch.go_on(more)
        text += new + more
    while len(text) <= 64:                                   # then from the last half, and never an error
        text += [d.id for _ in range(8) for d in batch.step()]
        batch.go_on([1] * 7)
        text += [1] * 7
    assert [d.id for d in batch.step()] == recomputed(model, text[-32:], 1)


def test_penalties_and_bias_are_their_definitions():
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])
    at = lambda **o: adjusted(logits, [0, 1], Counter([3, 3, 4]), Options(stop_ids=(3,), **o)).tolist()
    assert at() == logits.tolist() and at(min_new_tokens=3) == logits.tolist()
    assert at(repetition_penalty=2.0) == [1.0, -2.0, 0.5, 1.5, -4.0]                      # prompt and text
    assert at(presence_penalty=0.5, frequency_penalty=0.25) == [2.0, -1.0, 0.5, 2.0, -2.75]   # the text, by how often
    assert at(logit_bias=((2, 10.0), (0, -1.0))) == [1.0, -1.0, 10.5, 3.0, -2.0]
    assert at(min_new_tokens=4)[3] == -torch.inf


def test_penalties_act_on_a_row_by_its_own_text():
    model = tiny()                                        # tied and untrained it repeats its input for ever
    plain, fresh = (written(model, [[5], [7, 9]], 30, temperature=0, frequency_penalty=p) for p in (0.0, 1e4))
    assert all(len(set(t)) < 10 for t in plain) and all(len(set(t)) == 30 for t in fresh)
    assert fresh[1] == written(model, [[7, 9]], 30, temperature=0, frequency_penalty=1e4)[0]
    assert all(t == [11] * 30 for t in written(model, [[5], [7, 9]], 30, logit_bias=((11, 1e4),)))


def test_an_end_comes_no_sooner_than_asked_for():
    model = tiny(tie_embeddings=False)
    end = written(model, PROMPTS[:1], 1, temperature=0)[0]
    early, late = (written(model, PROMPTS[:1], 20, temperature=0, stop_ids=end, min_new_tokens=n)[0] for n in (0, 7))
    assert len(early) == 1 and len(late) >= 8 and end[0] not in late[:7]


def test_log_probabilities_are_the_models_own():
    model = tiny()
    batch = Batch(model)
    batch.add(0, PROMPTS[0], Options(temperature=0.3, top_k=5, frequency_penalty=1.0, logprobs=3, max_new_tokens=6), 1)
    text = list(PROMPTS[0])
    while drawn := batch.step():
        want = model(torch.tensor([text]))[0, -1].log_softmax(-1)
        assert drawn[0].logprob == pytest.approx(want[drawn[0].id].item(), abs=1e-4)
        assert [i for i, _ in drawn[0].top] == want.topk(3)[1].tolist()
        assert [p for _, p in drawn[0].top] == pytest.approx(want.topk(3)[0].tolist(), abs=1e-4)
        text.append(drawn[0].id)
    assert len(text) == len(PROMPTS[0]) + 6


@torch.no_grad()
def test_a_prompt_is_taken_in_by_pieces(monkeypatch):
    model = tiny(layers="attention(window=7) mamba2")
    want = written(model, PROMPTS, 20, temperature=0)
    monkeypatch.setattr(generation, "PIECE", 6)
    assert written(model, PROMPTS, 20, temperature=0) == want


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


@torch.no_grad()
@pytest.mark.parametrize("cfg", [dict(layers="attention(window=9)"), dict(layers="mamba2"), dict(kv_cache="streaming(sinks=2, window=11)"),
                                 dict(kv_cache="h2o(budget=16, recent=8)")], ids=str)
def test_text_slides_on_in_a_state_without_an_end(cfg):
    """As one long text fed to the state; a prompt longer than the context is read whole. What a row remembers of its text is bounded."""
    model = tiny(block_size=32, tie_embeddings=False, **cfg)
    prompt = tokens(1, 70)[0].tolist()
    state, want = model.init_state(1, 400), []
    logits = model(torch.tensor([prompt[:-1]]), state=state)
    for _ in range(150):
        logits = model(torch.tensor([[want[-1] if want else prompt[-1]]]), state=state)[0, -1]
        want.append(int(logits.argmax()))
    batch = Batch(model, overflow="slide")
    batch.add(0, prompt, Options(max_new_tokens=150, temperature=0), 0)
    batch.add(1, PROMPTS[0], Options(max_new_tokens=70, temperature=0), 0)
    got: list[list[int]] = [[], []]
    while drawn := batch.step():
        assert max(len(row.ids) for row in batch.rows) <= len(prompt) + 1
        for d in drawn:
            got[d.key].append(d.id)
    assert got[0] == want and len(set(want)) > 3 and len(got[1]) == 70
    assert Batch(model).overflow == ("half" if "layers" in cfg else "slide")
    batch.add(2, prompt, Options(max_new_tokens=90, temperature=0), 0)
    assert [d.id for _ in range(90) for d in batch.step()] == want[:90]
    more = PROMPTS[1]
    batch.go_on(more)
    again = [d.id for _ in range(90) for d in batch.step()]
    state = model.init_state(1, 400)
    fed = torch.tensor([[*prompt, *want[:90], *more]])
    model(fed[:, :len(prompt) + 89], state=state)
    logits = model(fed[:, len(prompt) + 89:], state=state)[0, -1]
    assert again[0] == int(logits.argmax()) or "h2o" in str(cfg)      # whose pieces decide what is kept


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("word", ["attention", "attention(window=9)", "gated_deltanet attention"])
def test_a_compiled_step_writes_the_same_and_is_compiled_once_for_all_lengths(word):
    import torch._dynamo
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(layers=word, tie_embeddings=False)
    want = written(model, PROMPTS[:2], 60, temperature=0)
    batch = Batch(model, compile=True)
    for i, p in enumerate(PROMPTS[:2]):
        batch.add(i, p, Options(temperature=0, max_new_tokens=60), 0)
    got: list[list[int]] = [[], []]
    for i in range(60):
        for d in batch.step():
            got[d.key].append(d.id)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if i == 2:
            early = graphs
    assert got == want and 0 < early == graphs <= 2


@torch.no_grad()
def test_overflow_may_be_refused():
    model = tiny(block_size=32, tie_embeddings=False)
    batch = Batch(model, overflow="refuse")
    with pytest.raises(ValueError, match="a prompt of 33 tokens does not fit into block_size=32"):
        batch.add(0, [1] * 33, Options(), 0)
    for n in (32, 30, 3):
        batch.add(n, tokens(1, n)[0].tolist(), Options(max_new_tokens=40, temperature=0), 0)
    got = Counter(d.key for drawn in iter(batch.step, []) for d in drawn)
    assert got == {32: 1, 30: 3, 3: 30}
    for cfg in (dict(), dict(layers="attention(window=9) attention"), dict(position="learned", kv_cache="h2o")):
        with pytest.raises(ValueError, match="overflow=slide needs a state"):
            Batch(tiny(**cfg), overflow="slide")


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


def test_a_session_takes_a_line_at_a_time(run):
    argv = ["--interactive", "--temperature=0", "--max_new_tokens=6", "--ignore_eot"]
    out = sample(run, *argv, stdin="ba\n\nQ😀\nab\n")
    assert out.returncode == 0 and out.stderr.count("the vocabulary lacks") == 1, out.stderr
    whole = sample(run, *argv[1:2], "--max_new_tokens=12", "--ignore_eot", "--prompt", "ba\n").stdout
    first, second = out.stdout[:6], out.stdout[7:13]
    assert whole == "ba\n" + first + second + "\n"
    assert "goes with none" in sample(run, *argv, "--json").stderr


def test_a_cache_is_chosen_by_name_and_its_cost_told(run):
    argv = ["--prompt", "ba", "--temperature=0", "--max_new_tokens=60"]
    whole = sample(run, *argv).stdout
    assert sample(run, *argv, "--kv_cache=h2o(budget=32, recent=8)", "--overflow=half").stdout == whole
    slides = sample(run, *argv, "--kv_cache", "streaming(sinks=2, window=6)")
    assert slides.returncode == 0 and len(slides.stdout) == len(whole)
    assert "error: kv_cache: unknown 'int5'" in sample(run, *argv, "--kv_cache=int5").stderr
    assert "error: overflow=slide needs a state" in sample(run, *argv, "--overflow=slide").stderr
    ask = lambda *a: subprocess.run([sys.executable, str(ROOT / "eval.py"), "--batch_size=8", *a], capture_output=True, cwd=run, encoding="utf-8")
    told = [ask("--kv_cache", cache, "--limit=16") for cache in ("h2o(budget=32, recent=8)", "streaming(sinks=1, window=3)")]
    assert all(out.returncode == 0 for out in told), told[0].stderr
    costs = [float(out.stdout.split("(")[2].split("%")[0]) for out in told]
    assert abs(costs[0]) <= 0.01 and abs(costs[1]) > 0.05 and "windows of 32; a row's state" in told[0].stdout
    assert ask("--kv_cache=int8", "--quantize=int8").stderr.endswith("leave one of them\n")
    full = ask("--limit=16").stdout
    assert full.startswith("val: loss") and "over 512 characters" in full


def test_guessing_ahead_changes_no_text(run):
    argv = ["--prompt", "ba", "--temperature=0", "--max_new_tokens=25", "--num_samples=2"]
    plain, drafted, found = sample(run, *argv), sample(run, *argv, "--draft=out/old", "--ahead=3"), sample(run, *argv, "--lookup")
    assert plain.stdout == drafted.stdout == found.stdout and "tokens a step by guessing 3 ahead" in drafted.stderr
    assert float(drafted.stderr.splitlines()[-1].split()[0]) > 1.5        # trained alike, it guesses well
    assert "give --draft or --lookup, one of them" in sample(run, "--lookup", "--draft=out/old").stderr
    assert "no checkpoint in out/nosuch" in sample(run, "--draft=out/nosuch").stderr


def test_json_is_a_line_a_text_in_order(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(["ba", "a", "ab"] * 30), encoding="utf-8")
    argv = ["--prompt_file", str(path), "--json", "--logprobs=2", "--max_new_tokens=5"]
    lines = [json.loads(line) for line in sample(run, *argv).stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["ba", "a", "ab"] * 30
    for line in lines:
        assert set(line) == {"prompt", "text", "ids", "finish_reason", "logprobs"}
        assert line["finish_reason"] == ("length" if len(line["ids"]) == 5 else "stop")
        for i, p in zip(line["ids"], line["logprobs"], strict=True):
            assert p["id"] == i and len(p["top"]) == 2 and p["logprob"] <= p["top"][0]["logprob"] + 1e-6 <= 1e-6


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
