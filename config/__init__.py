"""The model's and the run's settings, each documented where it is defined. No torch here, so that --help answers at once.

Defaults, then presets (config/*.py, plain assignments), then flags: the later wins. model.py and train.py re-export these.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from config.check import check_fields, check_range


@dataclass
class GPTConfig:
    """The model."""

    vocab_size: int = 50304
    """tokens in the vocabulary (50304 is GPT-2's 50257, padded to a multiple of 64)"""
    block_size: int = 1024
    """the longest context it is trained on, in tokens"""
    n_layer: int = 12
    """blocks"""
    n_head: int = 12
    """query heads"""
    n_kv_head: int | None = None
    """key/value heads: None as many as n_head (MHA), 1 is MQA, between is GQA"""
    n_embd: int = 768
    """width of the residual stream"""
    head_dim: int | None = None
    """width of a head (None: n_embd / n_head)"""
    layers: str = "attention"
    """sequence mixers, tiled over the layers, e.g. "attention(window=512)*3 attention"; `a|b` runs two side by side"""
    mlp: Literal["swiglu", "gelu", "gelu_tanh", "relu2", "rwkv6", "rwkv7"] = "swiglu"
    """feed-forward: swiglu (gated), gelu (exact), gelu_tanh (GPT-2's), relu2 (squared ReLU), rwkv6 and rwkv7 (relu2 that sees the token
    before; with a gate in rwkv6)"""
    n_inner: int | None = None
    """hidden width of the feed-forward (None: 4 n_embd; 8/3 n_embd rounded up to 32 for swiglu, 7/2 rounded down for rwkv6)"""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """normalisation before each half of a block and before the head"""
    norm_eps: float = 1e-5
    """added to the variance"""
    bias: bool = False
    """biases in linear layers and in LayerNorm"""
    position: Literal["rope", "learned", "sinusoidal", "alibi", "none"] = "rope"
    """how order is told"""
    rope_theta: float = 10000.0
    """base of RoPE's frequencies"""
    rope_scaling: str = "none"
    """for contexts beyond the `original` one: linear(factor=4), ntk(factor=4), "dynamic(factor=4, original=1024)", yarn, longrope, llama3
    (ops/rope.py); block_size is the longer one then. tools/extend.py sets it in a checkpoint"""
    rope_layout: Literal["half", "interleaved"] = "half"
    """which channels RoPE pairs: i with i + D/2 (Hugging Face), or 2i with 2i + 1 (Meta, GPT-J)"""
    qk_norm: bool = False
    """RMSNorm over each head of the queries and keys, before RoPE (Qwen3)"""
    window: int = 0
    """keys that a query sees, itself included (0: all before it); a word's option goes before it"""
    sinks: int = 0
    """first tokens of the document that stay visible outside the window"""
    attn_softcap: float = 0.0
    """attention scores s become c tanh(s / c) (0: off; Gemma 2 has 50)"""
    logit_softcap: float = 0.0
    """the same for the logits (0: off; Gemma 2 has 30)"""
    tie_embeddings: bool = True
    """the head's matrix is the embedding's"""
    init: Literal["gpt2", "zero"] = "gpt2"
    """weights at the start: gpt2 is N(0, 0.02); zero starts every matrix that writes to the residual stream, and the head, at 0"""
    dropout: float = 0.0
    """share of activations dropped in training, of the embeddings and of what each half of a block adds"""
    attn_dropout: float = 0.0
    """share of attention weights dropped in training (no fused kernel on a CPU does that)"""
    loss_chunk: int = 0
    """tokens whose logits are held at once in training (0: all of a micro-batch); less memory where the vocabulary is large"""
    kv_cache: str = "full"
    """what attention without a window keeps of its past in generation: full; int8, int4 (rounded); streaming(sinks=4, window=1020),
    h2o(budget=512), snapkv(budget=512), which drop keys and take text of any length (mixers/kv_cache.py)"""
    attention_backend: Literal["auto", "reference", "sdpa", "flex", "flash"] = "auto"
    """what computes attention; what it cannot do falls to the next that can"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ["block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "n_inner", "norm_eps", "rope_theta"]:
            check_range(self, name, above=0)
        for name in ["vocab_size", "window", "sinks", "attn_softcap", "logit_softcap", "loss_chunk"]:
            check_range(self, name, least=0)
        for name in ("dropout", "attn_dropout"):
            check_range(self, name, least=0, below=1)
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}: change one, or set head_dim")
        if self.n_head % (self.n_kv_head or self.n_head):
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if self.position == "rope" and (self.head_dim or self.n_embd // self.n_head) % 2:
            raise ValueError("RoPE turns pairs of channels: head_dim must be even")
        if self.init == "zero" and self.tie_embeddings:
            raise ValueError("init='zero' starts the head at 0, so it needs tie_embeddings=False")
        if self.sinks and not self.window:
            raise ValueError(f"sinks={self.sinks} needs a window; without one every token is visible anyway")

    def model_fields(self) -> dict:
        """The fields of GPTConfig alone, whatever the subclass: what makes the model."""
        return {f.name: getattr(self, f.name) for f in fields(GPTConfig)}


@dataclass
class TrainConfig(GPTConfig):
    """A training run. A PRESET is a file of plain assignments, such as config/demo.py, or its bare name there (demo); flags come
    after it. The fields of the model are listed first."""

    vocab_size: int = 0
    """tokens in the vocabulary (0: as many as the corpus's tokenizer has)"""
    dataset: str = "shakespeare"
    """a corpus under data/, the path of a prepared folder, or several by weight: fineweb_edu:0.8,python:0.2"""
    documents: bool = False
    """attention and positions begin anew at every end-of-text token: packed documents do not see one another"""
    out_dir: str | None = None
    """the run's own folder (None: out/<preset's name>)"""
    init_from: str = "scratch"
    """scratch, resume (go on with out_dir), auto (resume if there is something), or a checkpoint to start from"""
    eval_only: bool = False
    """measure the loss of what init_from names, and stop"""
    batch_size: int = 12
    """rows of a micro-batch"""
    gradient_accumulation_steps: int = 1
    """micro-batches a step: the global batch is batch_size times this"""
    max_iters: int = 2000
    """optimizer steps"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the hidden matrices, AdamW for embeddings, head and vectors"""
    learning_rate: float = 1e-3
    """AdamW's highest"""
    muon_lr: float = 0.02
    """Muon's highest; it follows the same course"""
    min_lr: float | None = None
    """the last (None: a tenth of learning_rate)"""
    warmup_iters: int = 100
    """steps over which it rises"""
    lr_decay_iters: int | None = None
    """step at which min_lr is reached (None: max_iters)"""
    lr_schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """after the warm-up: cosine or linear to min_lr, or wsd: constant, then linear over the last wsd_decay"""
    wsd_decay: float = 0.2
    """share of the steps over which wsd decays"""
    weight_decay: float = 0.1
    """AdamW's, on matrices only"""
    muon_momentum: float = 0.95
    """Muon's, reached after 300 steps from 0.85"""
    beta1: float = 0.9
    """AdamW's memory of gradients"""
    beta2: float = 0.95
    """AdamW's memory of squared gradients"""
    grad_clip: float = 1.0
    """largest norm of the gradient (0: no clipping)"""
    eval_interval: int = 250
    """steps between evaluations; a checkpoint is saved after each"""
    eval_iters: int = 0
    """micro-batches of each evaluation, always the same windows (0: the whole validation split)"""
    log_interval: int = 10
    """steps between lines of metrics.jsonl"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of the matrix products; weights and optimizer are float32 always (auto: bfloat16 where the processor gains by it)"""
    patience: int = 0
    """evaluations without a better loss after which the run ends (0: never)"""
    compile: bool | None = None
    """torch.compile (None: on CUDA)"""
    seed: int = 1337
    """of weights, data order and dropout"""
    wandb_log: bool = False
    """show the run on Weights & Biases too (pip install wandb); metrics.jsonl is written in any case"""
    wandb_project: str = "heed"
    """the project there"""
    wandb_run_name: str | None = None
    """the run's name there (None: that of out_dir)"""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: what WANDB_MODE says, else online with a key (wandb login), offline without; it never asks"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ["batch_size", "gradient_accumulation_steps", "learning_rate", "muon_lr", "eval_interval", "log_interval",
                     "lr_decay_iters"]:
            check_range(self, name, above=0)
        for name in ["max_iters", "patience", "min_lr", "warmup_iters", "weight_decay", "grad_clip", "eval_iters"]:
            check_range(self, name, least=0)
        for name in ("beta1", "beta2", "muon_momentum"):
            check_range(self, name, least=0, below=1)
        check_range(self, "wsd_decay", least=0, most=1)
        check_range(self, "seed", least=0, most=2**32 - 1)
        if self.lr_decay_iters is not None and self.lr_decay_iters <= self.warmup_iters:
            raise ValueError(f"lr_decay_iters={self.lr_decay_iters} must be above warmup_iters={self.warmup_iters}")

    def model(self, vocab_size: int | None = None) -> GPTConfig:
        """The model's part, with the corpus's vocabulary where none was set."""
        return GPTConfig(**{**self.model_fields(), "vocab_size": self.vocab_size or vocab_size or 0})


def from_dict(cls, d: dict):
    """The inverse of dataclasses.asdict; fields of a newer or older version are left out or take their defaults."""
    names = {f.name for f in fields(cls)}
    return cls(**{k: v for k, v in d.items() if k in names})
