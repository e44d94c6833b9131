"""Shakespeare, by character: a GPT of 0.8 million parameters for two CPU cores, a laptop, or any GPU."""

dataset = "shakespeare"

n_layer = 4
n_head = 2
n_embd = 128
block_size = 128
norm = "layernorm"          # a fused kernel on CPUs, where RMSNorm has none
qk_norm = True
tie_embeddings = False
init = "zero"

batch_size = 8              # many small steps: 2,000 of 8 rows reach 1.58 where 1,000 of 16 rows reach 1.60
max_iters = 2000
learning_rate = 3e-3
min_lr = 1e-4
warmup_iters = 50
lr_schedule = "linear"
eval_interval = 500

# validation loss 1.578 nats a character, 95 % of sampled words in the corpus, in 88 s on 2 cores of a Zen 4 EPYC (bfloat16), 2026-11-29
