"""Computes with transformers what `train_gpt eval` must print: perplexity, LAMBADA,
HellaSwag.

    python dev/reference/evaluate.py --from DIR --task perplexity|lambada|hellaswag --data FILE
                                     [--tokenizer FILE] [--seq-len T] [--stride S] [--limit N]

DIR is a model that from_pretrained loads. The tokenizer is that of --tokenizer, or else
DIR's tokenizer.json; without either a token is a byte. Scores one sequence at a time in
float32, so it is slow, and there is no padding that could be wrong.

perplexity   windows of T tokens, every S tokens, each token counted once: https://huggingface.co/docs/transformers/perplexity.
             (From the second window on, that page weighs the mean loss of a window by a count that is one too small. Here the
             sum of losses is divided by the number of losses.) FILE is text, a token file of tokenizer/, or raw uint16 ids. <|endoftext|> at the end of a line divides a text
             into documents, each of which ends with that token, as in training.
lambada      the rules of lambada_openai in EleutherAI's lm-evaluation-harness
hellaswag    the rules of its hellaswag
"""

import argparse
import json
import math
import pathlib
import re
import sys

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import GPTNeoForCausalLM, logging

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/tokenizer")]

from testing import read_tokens as read_token_file  # noqa: E402


class Bytes:
    """The tokenizer of a model of bytes."""

    first = ord("\n")

    def encode(self, text):
        """Token ids of a text."""
        return list(text.encode())

    def count_bytes(self, tokens):
        """Bytes of the tokens' text."""
        return len(tokens)


class Library:
    """A tokenizer.json."""

    def __init__(self, path):
        self.tokenizer = Tokenizer.from_file(str(path))
        self.first = self.tokenizer.token_to_id("<|endoftext|>")
        letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in letters]
        self.letters = {chr(byte): 1 for byte in letters} | {chr(256 + i): 1 for i in range(len(others))}

    def encode(self, text):
        """Token ids of a text, without those that a post-processor would put around it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count_bytes(self, tokens):
        """Bytes of the tokens' text: one for each letter of an ordinary token; <|endoftext|> has none."""
        tokens = [token for token in tokens if token != self.first]
        texts = (self.tokenizer.id_to_token(token) for token in tokens)
        return sum(len(text) if all(letter in self.letters for letter in text) else len(text.encode()) for text in texts)


class Scorer:
    """A model, and the length of the longest sequence that it is given."""

    def __init__(self, directory, length):
        self.model = GPTNeoForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.length = length or self.model.config.max_position_embeddings

    @torch.no_grad()
    def score(self, tokens, scored):
        """Log-probabilities of the last `scored` tokens, and whether each of them is the most probable one."""
        logits = self.model(torch.tensor([tokens[:-1]])).logits[0, -scored:].double()
        targets = torch.tensor(tokens[-scored:])
        return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0], logits.argmax(-1) == targets

    def score_pair(self, tokenizer, context, continuation):
        """Log-likelihood of a continuation, and whether greedy decoding would write it; after the harness's _encode_pair."""
        if context == "":
            given, whole = 1, tokenizer.encode(continuation)
            whole = whole if whole[0] == tokenizer.first else [tokenizer.first, *whole]
        else:
            whole, given = tokenizer.encode(context + continuation), len(tokenizer.encode(context.rstrip()))
        values, greedy = self.score(whole[-(self.length + 1):], len(whole) - given)
        return values.sum().item(), bool(greedy.all())


def read_lines(path, limit):
    """The objects of a file of JSON lines."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    return lines[:limit or None]


def read_tokens(path, tokenizer):
    """Token ids of a file, and their mask or None."""
    data = path.read_bytes()
    if data.startswith(b"\x89ACCO"):
        return read_token_file(path)
    if path.suffix == ".bin" or isinstance(tokenizer, Bytes):
        return np.frombuffer(data, "<u2").tolist() if path.suffix == ".bin" else tokenizer.encode(data.decode()), None
    parts = re.split(r"<\|endoftext\|>[ \t]*\r?$\n?", data.decode(), flags=re.MULTILINE)
    documents = [part.strip("\r\n") for part in parts]
    return [token for text in documents if text for token in (*tokenizer.encode(text), tokenizer.first)], None


def perplexity(scorer, tokenizer, options):
    """Perplexity over strided windows."""
    tokens, mask = read_tokens(options.data, tokenizer)
    stride, counted, nats, count, size, windows = options.stride or scorer.length // 2, 0, 0.0, 0, 0, 0
    for begin in range(0, len(tokens), stride):
        if counted == len(tokens) or (options.limit and windows == options.limit):
            break
        end = min(begin + scorer.length, len(tokens))
        first, counted = max(counted, begin + 1), end
        if first >= end:
            continue
        counts = np.ones(end - first, bool) if mask is None else np.asarray(mask[first:end], bool)
        values, _ = scorer.score(tokens[begin:end], end - first)
        nats -= values[torch.from_numpy(counts)].sum().item()
        count += int(counts.sum())
        if tokenizer is not None:
            size += tokenizer.count_bytes([token for token, wanted in zip(tokens[first:end], counts) if wanted])
        windows += 1
    result = {"windows": windows, "tokens": count, "nats per token": nats / count, "perplexity": math.exp(nats / count)}
    return result | ({"bits per byte": nats / math.log(2) / size} if size else {})


def lambada(scorer, tokenizer, options):
    """Predicts the last word of each text."""
    texts = [line["text"].split(" ") for line in read_lines(options.data, options.limit)]
    scores = [scorer.score_pair(tokenizer, " ".join(words[:-1]), " " + words[-1]) for words in texts]
    values, greedy = zip(*scores)
    return {"lines": len(scores), "perplexity": math.exp(-sum(values) / len(values)), "acc": sum(greedy) / len(greedy)}


def clean(text):
    """What the harness does in preprocess."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub("\\[.*?\\]", "", text).replace("  ", " ")


def question(line):
    """Context and endings of a line of HellaSwag."""
    context = line["ctx_a"] + " " + line["ctx_b"].capitalize()
    return clean(line["activity_label"] + ": " + context), [clean(ending) for ending in line["endings"]]


def hellaswag(scorer, tokenizer, options):
    """Chooses the most probable ending."""
    right = right_norm = 0
    lines = read_lines(options.data, options.limit)
    for line in lines:
        context, endings = question(line)
        values = np.array([scorer.score_pair(tokenizer, context, " " + ending)[0] for ending in endings])
        right += int(values.argmax()) == int(line["label"])
        right_norm += int((values / [float(len(ending)) for ending in endings]).argmax()) == int(line["label"])
    return {"lines": len(lines), "acc": right / len(lines), "acc_norm": right_norm / len(lines)}


def find_tokenizer(options):
    """The tokenizer; None for token files whose tokenizer is not named."""
    path = options.tokenizer or options.source / "tokenizer.json"
    if path.exists():
        return Library(path)
    return None if options.task == "perplexity" and options.data.suffix == ".bin" else Bytes()


def main():
    """Prints the numbers of a task."""
    tasks = {"perplexity": perplexity, "lambada": lambada, "hellaswag": hellaswag}
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--from", dest="source", type=pathlib.Path, required=True)
    parser.add_argument("--task", choices=tasks, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path)
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--stride", type=int, default=0)
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, value in tasks[options.task](Scorer(options.source, options.seq_len), find_tokenizer(options), options).items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
