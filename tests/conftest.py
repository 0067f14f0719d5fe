import torch

# Tiny models gain nothing from threads, and tests run in several processes.
torch.set_num_threads(1)
