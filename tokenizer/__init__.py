"""Prepares what train_gpt reads: a byte-level BPE, documents for `train_gpt tokenize`, the texts
of a chat template, and model files of llm.c.

    python -m tokenizer.train_bpe --size 4096 --out DIR FILES...
    python -m tokenizer.prepare --tokenizer DIR --out PREFIX FILES...
    python -m tokenizer.chat MODEL
    python -m tokenizer.llmc FILE DIR

`make tokenizer` builds an environment for them, build/venv, whose Python finds this package
from any directory. Another environment with requirements.txt finds it in the root of the
project.
"""
