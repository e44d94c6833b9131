"""Shakespeare, by character, in nanoGPT's shape: GPT-2's architecture at 10.7 million parameters."""

dataset = "shakespeare"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
position = "learned"
norm = "layernorm"
mlp = "gelu"
dropout = 0.2

batch_size = 64
max_iters = 5000            # 82 M tokens, 82 epochs
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99
eval_interval = 250

# 9,700 tokens/s on 2 cores of a Sapphire Rapids Xeon (bfloat16), 2026-11-29: the whole run takes 2 h 20 min there and was not made.
# nanoGPT reports a validation loss of 1.47 for this shape on the canonical text (--dataset of `data.shakespeare.prepare --download`).
