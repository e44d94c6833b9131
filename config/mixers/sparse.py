"""config/python_code.py with strided attention (Sparse Transformer): 16 neighbours and every 16th key of 256."""

dataset = "python"

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
layers = "sparse(pattern='local(16) | strided(16)')"
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
