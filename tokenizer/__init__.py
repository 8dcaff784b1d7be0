"""Text to tokens: train a byte-level BPE, and prepare files of tokens that train_gpt reads. Also old weights to new.

    python -m tokenizer.train_bpe --size 4096 --out DIR FILES...
    python -m tokenizer.prepare --tokenizer DIR --out PREFIX FILES...
    python -m tokenizer.from_pytorch DIR OUT

Run from the root of the project, in an environment with requirements.txt installed.
"""
