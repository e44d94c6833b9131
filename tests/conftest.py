"""What the tests share: tiny models loud enough to show mistakes, and a corpus made up on the spot."""

import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:      # a process a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from bench.checks import made_up
from model import GPT, GPTConfig

# Every word of MIXERS is tested as it is; words with options that change what the code does are added here.
VARIANTS = {
    "attention": ["attention(window=7)", "attention(window=7, sinks=3)", "attention(window=80)", "attention(rope=False) attention",
                  "attention(window=5)|attention", "attention(sink_logit=True, gate=True, rotary=4)",
                  "attention(window=7, sinks=3, sink_logit=True) attention(theta=1e6)", "attention(window=80, sink_logit=True, gate=True)"],
    "forgetting": ["forgetting(window=7, gate=True)", "forgetting(sink_logit=True, rope=False) attention", "forgetting(window=80)|attention(window=3)"],
    "gla": ["gla(expand_k=1.0, gate_root=1.0, gate_rank=3)", "gla(decay='lightning')", "gla(decay='lightning', slope=0.3, expand_v=2.0)|attention(window=3)"],
    "linear": ["linear(feature='relu', rope=False) attention", "linear(normalize=False, feature='identity')", "linear(normalize=False, feature='silu')"],
    "retention": ["retention(expand_v=1, rope=False)|attention(window=3)"],
    "mla": ["mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=12)", "mla(window=7, sinks=3)",
            "mla(rope=False) attention"],
    "sparse": ["sparse(pattern='first(3) | local(7)')", "sparse(pattern='fixed(8)')", "sparse(pattern='chunk(9)', rope=False)",
               "sparse(pattern='local(6) / strided(5) & local(30)')", "sparse(pattern='local_blocks(2, 4) | random_blocks(2, 4, seed=3)')",
               "sparse(pattern='first(3) | strided(7)', sink_logit=True, gate=True, theta=100.0)"],
    "lowrank": ["lowrank(segment=5, rank=2)", "lowrank(segment=8, rank=3, rotary=4)", "lowrank(segment=1, rank=1)|attention(window=3)"],
    "hierarchical": ["hierarchical(sentence=3, paragraph=2)", "hierarchical(sentence=4, paragraph=3, rope=False)|attention(window=3)",
                     "hierarchical(sentence=2, paragraph=5)", "hierarchical(sentence=7, paragraph=2, ends=(1, 3, 5, 7, 9, 11, 60), shortest=2)"],
    "mamba": ["mamba(d_state=5, d_conv=3, expand=1, dt_rank=7)", "mamba(norms=True) attention(rope=False)", "mamba(d_conv=1)|attention(window=5)"],
    "mamba2": ["mamba2(d_state=5, head_dim=8, n_groups=4, d_conv=3)", "mamba2(head_dim=4, expand=1, n_groups=2)|attention", "mamba2(head_dim=16) attention"],
    "deltanet": ["deltanet(heads=6, key_heads=3, key_dim=5, value_dim=7, conv=3, negative=True)"],
    "gated_deltanet": ["gated_deltanet(key_heads=2, value_dim=12)", "gated_deltanet(conv=1)|attention(window=3)"],
    "kda": ["kda(heads=2, key_heads=1, key_dim=12)", "kda(negative=True) attention(gate=True, rope=False)"],
    "rwkv6": ["rwkv6(mix_rank=4, decay_rank=3)", "rwkv6 attention"],
    "rwkv7": ["rwkv7(decay_rank=3, rate_rank=5, value_rank=2, gate_rank=7)", "attention rwkv7", "rwkv7|rwkv7", "rwkv7|attention(window=3)"],
    "nsa": ["nsa(compress=4, stride=2, select=4, blocks=3, window=5)", "nsa(compress=5, stride=3, select=7, blocks=4, window=6, rotary=4)",
            "nsa(compress=8, stride=8, select=3, blocks=5, window=80)|attention(window=3)"],
}


def words() -> list[str]:
    from mixers import MIXERS
    return [w for name in MIXERS for w in [name, *VARIANTS.get(name, [])]]


def tiny(torch_seed: int = 0, **kw) -> GPT:
    """A model of 2 layers whose weights are large enough that every path shows in the logits; float32, evaluation mode."""
    torch.manual_seed(torch_seed)
    model = GPT(GPTConfig(**{**dict(vocab_size=65, block_size=256, n_layer=2, n_head=4, n_embd=32), **kw}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def tokens(B: int, T: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(65, (B, T), generator=torch.Generator().manual_seed(seed))


def fed(model: GPT, x: torch.Tensor, pieces: list[int], state=None, pos=None) -> torch.Tensor:
    """The logits of x fed to a state in pieces."""
    assert sum(pieces) == x.shape[1]
    state = model.init_state(len(x), x.shape[1]) if state is None else state
    out, i = [], 0
    for n in pieces:
        out.append(model(x[:, i:i + n], pos=None if pos is None else pos[:, i:i + n], state=state))
        i += n
    return torch.cat(out, 1)


def has_loopback() -> bool:
    """Whether 127.0.0.1 can be reached, as it can on any machine but in a bare network namespace."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=2):
            return True
    except OSError:
        return False


needs_loopback = pytest.mark.skipif(not has_loopback(), reason="the loopback interface is down: ip link set lo up")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared folder of made-up text, by character."""
    from data.build import build
    from data.documents import Document
    text = made_up()
    return build(tmp_path_factory.mktemp("corpus"), lambda: [Document("", [text])], "char")
