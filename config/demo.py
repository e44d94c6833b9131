n_layer = 4
# 1
