#!/usr/bin/env python3
"""Makes a Hugging Face directory of a model of llama2.c, so that weights that others trained can be tried.

    python dev/reference/from_llama2c.py MODEL.bin TOKENIZER.bin DIR

MODEL.bin is llama2.c's first format: seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len;
a negative vocab_size says that the head is a matrix of its own), then float32: each kind of tensor with all its layers. llama2.c
turns neighbouring channels of a head by one angle, transformers turns a channel and the one half a head behind it, so the rows of q_proj and
k_proj are put in another order.

TOKENIZER.bin has an int32, then of every token a float32 (its score), an int32 (its length) and its bytes, with a blank for U+2581.
SentencePiece merges the pair whose result has the highest score. So the merges of tokenizer.json are all pairs of tokens that
make a token, by its score.
"""

import json
import pathlib
import struct
import sys

import numpy
from safetensors.numpy import save_file

BLANK = "\u2581"


def rows_of_halves(weight, head_size):
    """(out, in), the rows of each head: all even channels, then all odd ones."""
    return weight.reshape(-1, head_size // 2, 2, weight.shape[1]).transpose(0, 2, 1, 3).reshape(weight.shape).copy()


def model(path):
    """The settings and the tensors of MODEL.bin under their names in transformers."""
    data = pathlib.Path(path).read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack("7i", data[:28])
    tied, vocabulary, head_size = vocabulary > 0, abs(vocabulary), dim // heads
    values, tensors = numpy.frombuffer(data, numpy.float32, offset=28), {}
    kv = kv_heads * head_size
    kinds = [(None, "embed_tokens", (vocabulary, dim)), (layers, "input_layernorm", (dim,)), (layers, "self_attn.q_proj", (dim, dim)),
             (layers, "self_attn.k_proj", (kv, dim)), (layers, "self_attn.v_proj", (kv, dim)), (layers, "self_attn.o_proj", (dim, dim)),
             (layers, "post_attention_layernorm", (dim,)), (layers, "mlp.gate_proj", (hidden, dim)), (layers, "mlp.down_proj", (dim, hidden)),
             (layers, "mlp.up_proj", (hidden, dim)), (None, "norm", (dim,)), (None, "angles", (positions, head_size))]
    if not tied:
        kinds.append((None, "head", (vocabulary, dim)))
    at = 0
    for count, name, shape in kinds:
        for layer in range(count or 1):
            size = int(numpy.prod(shape))
            weight = values[at:at + size].reshape(shape).copy()
            at += size
            if name.endswith(("q_proj", "k_proj")):
                weight = rows_of_halves(weight, head_size)
            if name == "head":
                tensors["lm_head.weight"] = weight
            elif name != "angles":
                tensors[f"model.layers.{layer}.{name}.weight" if count else f"model.{name}.weight"] = weight
    assert at == len(values), f"{path} has {len(values)} numbers, of which {at} are known"
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": dim, "intermediate_size": hidden,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
              "max_position_embeddings": positions, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    return config, tensors


def tokenizer(path, size):
    """tokenizer.json of TOKENIZER.bin, which has `size` tokens."""
    data, at, pieces, scores = pathlib.Path(path).read_bytes(), 4, [], []
    for _ in range(size):
        score, length = struct.unpack_from("fi", data, at)
        pieces.append(data[at + 8:at + 8 + length].decode().strip("\n" if len(pieces) < 3 else "").replace(" ", BLANK))
        scores.append(score)
        at += 8 + length
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    assert len(vocabulary) == size and at == len(data), f"{path} is not of {size} different tokens"
    merges = []
    for token in sorted(range(3 + 256, size), key=lambda token: -scores[token]):
        piece = pieces[token]
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in vocabulary and piece[cut:] in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    special = [{"id": token, "content": pieces[token], "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
               for token in range(3)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    first = {"SpecialToken": {"id": pieces[1], "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, replace]}, "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {pieces[1]: {"id": pieces[1], "ids": [1], "tokens": [pieces[1]]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": BLANK}, "content": " "}, {"type": "ByteFallback"},
                                                     {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": pieces[0], "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "vocab": vocabulary, "merges": [list(pair) for pair in merges]},
    }


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    config, tensors = model(sys.argv[1])
    directory = pathlib.Path(sys.argv[3])
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(sys.argv[2], config["vocab_size"]), ensure_ascii=False, indent=1) + "\n")
    parameters = sum(tensor.size for tensor in tensors.values())
    print(f"{directory}: {parameters} parameters, {config['vocab_size']} tokens")


if __name__ == "__main__":
    main()
