"""Prepares what train_gpt reads: a byte-level BPE, files of tokens, and weights that
PyTorch saved.

    python -m tokenizer.train_bpe --size 4096 --out DIR FILES...
    python -m tokenizer.prepare --tokenizer DIR --out PREFIX FILES...
    python -m tokenizer.from_pytorch DIR OUT

Run from the root of the project, in an environment with requirements.txt installed (make
tokenizer).
"""
