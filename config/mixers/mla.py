"""config/python_code.py with multi-head latent attention: a token leaves 288 numbers a layer, where attention leaves 512."""

dataset = "python"

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
layers = "mla"
norm = "layernorm"           # a fused kernel on CPUs, where RMSNorm has none
mlp = "relu2"
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
