"""Native Sparse Attention in the model of config/python_code.py: blocks scaled to its context of 256."""

dataset = "python"

layers = "nsa(compress=8, stride=4, select=16, blocks=4, window=32)"
n_layer = 6
n_head = 4
n_kv_head = 2                # the heads of a group choose together
n_embd = 256
block_size = 256
norm = "layernorm"           # a fused kernel on CPUs, where RMSNorm has none
mlp = "relu2"
qk_norm = True
tie_embeddings = False
init = "zero"

optimizer = "muon"
batch_size = 8
max_iters = 1000
learning_rate = 3e-3
min_lr = 1e-4
warmup_iters = 50
lr_schedule = "linear"
eval_interval = 250
# not measured yet
