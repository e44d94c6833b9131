"""GPT-2 small's size with today's blocks, in Qwen3's proportions, on FineWeb-Edu: 10 billion tokens, for one node of 8 GPUs.

    torchrun --nproc-per-node=8 train.py config/small.py

The global batch is 512 rows whatever the number of GPUs. One GPU of 24 GB: --batch_size=8 --gradient_accumulation_steps=64;
of 80 GB: --batch_size=32 --gradient_accumulation_steps=16 (11 and 38 GiB by the estimate that a run begins with).
"""

dataset = "fineweb_edu"      # python -m data.fineweb_edu.prepare

n_layer = 12
n_head = 12
n_kv_head = 6
n_embd = 768
n_inner = 2304
block_size = 1024
vocab_size = 50304           # GPT-2's 50,257, padded to a multiple of 64
qk_norm = True
norm_eps = 1e-6
rope_theta = 1e6

batch_size = 16
gradient_accumulation_steps = 32
max_iters = 19_073           # of 524,288 tokens: 10.0 billion, one epoch of sample-10BT
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 700
eval_interval = 250
eval_iters = 64

# 124 M parameters, 8.5e18 operations: 45 minutes of 8 H100 at 40 % of their peak, by arithmetic. No run on GPUs has been recorded yet.
