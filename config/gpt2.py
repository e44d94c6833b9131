"""GPT-2's own architecture, 124 M, with nanoGPT's settings on OpenWebText.

    torchrun --nproc-per-node=8 train.py config/gpt2.py
"""

dataset = "openwebtext"      # python -m data.openwebtext.prepare

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304           # GPT-2's 50,257, padded to a multiple of 64
position = "learned"
norm = "layernorm"
mlp = "gelu_tanh"
bias = True

batch_size = 12
gradient_accumulation_steps = 40
max_iters = 600_000          # of 491,520 tokens: 295 billion
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1
eval_interval = 1000
eval_iters = 200

# nanoGPT reports a validation loss of 2.85 with these settings (its README: 4 days on 8 A100 of 40 GB).
# No run of this file has been recorded yet.
