"""The server, by OpenAI's own client: served is sampled, requests come and go, nonsense is refused."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, needs_loopback, tiny

from data.tokenizer import Bytes
from engine.generate import Batch, Options
from engine.speculate import Draft, Lookup

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
from tools.serve import app

pytestmark = needs_loopback
TOKENIZER = Bytes()


def model():
    return tiny(vocab_size=TOKENIZER.vocab_size, tie_embeddings=False, layers="attention mamba2")


@contextlib.contextmanager
def served(rows=4, waiting=50, **how):
    its = model()
    make = lambda: Batch(its, rows, TOKENIZER.vocab_size, **how)
    config = uvicorn.Config(app(make, TOKENIZER, "tiny", waiting), port=0, log_level="error", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def client():
    with served() as client:
        yield client


def sampled(prompt, seed=0, **options):
    """The ids, by the engine alone."""
    batch, ids = Batch(model(), vocab_size=TOKENIZER.vocab_size), []
    batch.add(0, TOKENIZER.encode(prompt), Options(stop_ids=(TOKENIZER.eot,), **options), seed)
    while drawn := batch.step():
        ids.append(drawn[0])
    return ids


def text(drawn):
    return b"".join(TOKENIZER.token_bytes(d.id) for d in drawn).decode("utf-8", "replace")


@pytest.mark.parametrize("guesser", [Lookup(3), Draft(model(), 2)], ids=["lookup", "draft"])
def test_guesses_change_no_text_also_after_what_went_wrong(guesser):
    """The model breaks once in the middle; the draft has read along, and must forget it."""
    with served(rows=2, speculate=guesser) as client:
        ask = lambda prompt, n: client.completions.create(model="tiny", prompt=prompt, max_tokens=n, temperature=0)
        for prompt in ("hello", "to be or not to be or not"):
            assert ask(prompt, 20).choices[0].text == text(sampled(prompt, temperature=0.0, max_new_tokens=20))
        keep, guesser.guess = guesser.guess, lambda *a: 1 / 0
        with pytest.raises(openai.InternalServerError):
            ask("hello", 20)
        guesser.guess = keep
        got = ask(["one", "a longer one", "two"], 25)
        for choice, prompt in zip(got.choices, ["one", "a longer one", "two"]):
            assert choice.text == text(sampled(prompt, temperature=0.0, max_new_tokens=25))


def test_what_is_served_is_what_is_sampled(client):
    want = sampled("hello", temperature=0.0, max_new_tokens=30)
    got = client.completions.create(model="tiny", prompt="hello", max_tokens=30, temperature=0)
    assert got.choices[0].text == text(want) and got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 30, 35)
    two = client.completions.create(model="tiny", prompt=["a", "bc"], max_tokens=12, n=2, seed=7, temperature=0.9, top_p=0.9)
    assert [c.index for c in two.choices] == [0, 1, 2, 3]
    for i, c in enumerate(two.choices):
        assert c.text == text(sampled(["a", "bc"][i // 2], 7 * 1_000_003 + i, temperature=0.9, top_p=0.9, max_new_tokens=12))
    ids = client.completions.create(model="tiny", prompt=TOKENIZER.encode("hello"), max_tokens=30, temperature=0)
    assert ids.choices[0].text == got.choices[0].text and client.models.list().data[0].id == "tiny"


def test_a_stream_is_the_same_text_in_pieces(client):
    want = client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0)
    pieces = list(client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for p in pieces for c in p.choices) == want.choices[0].text and len(pieces) > 20
    assert pieces[-1].usage == want.usage and pieces[-2].choices[0].finish_reason == "length"
    assert all(c.finish_reason is None for p in pieces[:-2] for c in p.choices)


def test_a_stop_string_ends_it_and_is_not_shown(client):
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0).choices[0].text
    stop = whole[10:13]
    got = client.completions.create(model="tiny", prompt="hello", max_tokens=40, temperature=0, stop=[stop]).choices[0]
    assert got.text == whole[:whole.index(stop)] and got.finish_reason == "stop"


def test_log_probabilities_and_biases(client):
    want = sampled("hello", temperature=0.0, max_new_tokens=8, logprobs=3)
    got = client.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0, logprobs=3).choices[0].logprobs
    assert got.token_logprobs == pytest.approx([d.logprob for d in want], abs=1e-4) and len(got.tokens) == len(got.text_offset) == 8
    assert [max(t.values()) for t in got.top_logprobs] == pytest.approx([d.top[0][1] for d in want], abs=1e-4)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=5, logit_bias={"98": 1e4}).choices[0].text == "bbbbb"


@pytest.mark.parametrize("body, reason", [
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens"), ({"prompt": "a", "temperature": -1}, "temperature"), ({"prompt": {"a": 1}}, "prompt must be"),
    ({"prompt": []}, "empty list"), ({"prompt": [99999]}, "token ids below"), ({"prompt": [[1], "a", 2]}, "prompt must be"), ({"prompt": "a" * 300}, "300 tokens"),
    ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'"), ({"prompt": "a", "stop": [1]}, "stop"), ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"), ({"prompt": "a", "n": 0}, "n=0"), ({"prompt": "a", "stream": True, "stream_options": 5}, "stream_options"),
    ({"prompt": "a", "presence_penalty": float("nan")}, "presence_penalty"), ({"prompt": "a", "logit_bias": {"5": 1e39}}, "logit_bias of 5"),
    ({"prompt": "a", "temperature": 10**400}, ""), ({"prompt": ["a"] * 60}, "60 texts in one request"), ([1, 2], "JSON object"), (b"{not json", "Expecting"), (b"\xff\xfe", ""),
    (b"[" * 100_000, "")])
def test_nonsense_is_a_clear_400(client, body, reason):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{client.base_url}completions", data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as e:
        urllib.request.urlopen(request, timeout=30)
    assert e.value.code == 400 and reason in json.loads(e.value.read())["error"]["message"]


def test_whoever_hangs_up_frees_the_row_and_the_queue_is_bounded():
    with served(rows=1, waiting=1) as client:
        create = lambda **kw: client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True}, **{"max_tokens": 1_000_000, "stream": True, **kw})
        first = create()
        next(iter(first))
        second = create()                                       # waits
        time.sleep(0.2)
        with pytest.raises(openai.RateLimitError, match="try again later"):
            create()
        first.close()
        next(iter(second))                                      # has the row now
        second.close()
        with pytest.raises(openai.APITimeoutError):             # not streamed: who waits no longer frees it too
            create(stream=False, timeout=0.5)
        assert len(create(stream=False, max_tokens=5).choices[0].text) >= 1


def test_an_error_of_the_model_fails_those_requests_alone(monkeypatch):
    with served() as client:
        right = Batch.step
        monkeypatch.setattr(Batch, "step", lambda self: (_ for _ in ()).throw(RuntimeError("no memory")) if self.waiting else right(self))
        with pytest.raises(openai.InternalServerError, match="no memory"):
            client.completions.create(model="tiny", prompt="a")
        monkeypatch.setattr(Batch, "step", right)
        assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens <= 3


def test_the_command_serves_and_ends_cleanly(tmp_path, corpus):
    from config import TrainConfig
    from train import train
    train(TrainConfig(dataset=str(corpus), out_dir=str(tmp_path / "run"), n_layer=1, n_head=2, n_embd=16, block_size=32, batch_size=4, max_iters=2, eval_iters=1, device="cpu", dtype="float32"))
    run = subprocess.Popen([sys.executable, "-m", "tools.serve", "--checkpoint", str(tmp_path / "run"), "--port=0"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    line = next(line for line in run.stderr if "running on" in line)
    port = int(line.split("127.0.0.1:")[1].split()[0])
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    assert client.completions.create(model="run", prompt="ba", max_tokens=4).usage.completion_tokens >= 1
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=30) in (0, 130, -signal.SIGINT) and "Traceback" not in run.stderr.read()


@pytest.mark.slow
def test_forty_clients_some_hanging_up_some_sending_garbage():
    """Every good request is answered with the text it would have alone, and no row is left taken."""
    want = {f"{i}": text(sampled(f"{i}", temperature=0.0, max_new_tokens=20)) for i in range(20)}
    until = time.time() + 60

    def one(client, me):
        draw, good = random.Random(me), 0
        while time.time() < until:
            prompt, what = str(draw.randrange(20)), draw.random()
            if what < 0.2:
                s = client.completions.create(model="tiny", prompt=prompt, max_tokens=500, stream=True)
                next(iter(s))
                s.close()
            elif what < 0.4:
                with pytest.raises(openai.BadRequestError):
                    client.completions.create(model="tiny", prompt=prompt, max_tokens=-1)
            else:
                assert client.completions.create(model="tiny", prompt=prompt, max_tokens=20, temperature=0).choices[0].text == want[prompt]
                good += 1
        return good

    with served(rows=8, waiting=200) as client, ThreadPoolExecutor(40) as pool:
        counts = list(pool.map(lambda me: one(client, me), range(40)))
        assert min(counts) > 0
        assert client.completions.create(model="tiny", prompt="3", max_tokens=20, temperature=0).choices[0].text == want["3"]
