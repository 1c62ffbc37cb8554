"""`laga-attn train`: context-parallel training of MLA language models, from files to a checkpoint."""
