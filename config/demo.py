"""Shakespeare, by character: a GPT of 0.8 million parameters for two CPU cores, a laptop, or any GPU."""

dataset = "shakespeare"

n_layer = 4
n_head = 2
n_embd = 128
block_size = 128
norm = "layernorm"          # a fused kernel on CPUs, where RMSNorm has none
mlp = "relu2"
qk_norm = True
tie_embeddings = False
init = "zero"

optimizer = "muon"
batch_size = 16
max_iters = 1000
learning_rate = 3e-3
min_lr = 1e-4
warmup_iters = 50
lr_schedule = "linear"
eval_interval = 250

# validation loss 1.531 nats a character, 96 % of sampled words known, in 88 s on 2 cores of a Sapphire Rapids Xeon (bfloat16), 2026-11-29
