"""Checks GGUF files that train_gpt writes with llama.cpp itself, from the wheel llama-cpp-py-sync.

    make test-llama-cpp                 installs the wheel into build/venv-llama-cpp and runs this
    check.py answer FILE.gguf TEXT      what llama.cpp writes greedily behind TEXT, up to an end, and how fast

Random models of odd shapes of each architecture, with tokenizers of each kind that llama.cpp has a
name for, and a model that is trained here, with and without adapters: llama.cpp must load the file, cut
200 prompts into the same tokens, choose the same 60 tokens greedily, and have the same logits, as
fp32 up to 1e-4 of the largest. For f16, bf16 and q8_0 the largest difference is printed.

TOKENIZERS: directories with more tokenizers, such as a real one of Llama 3 and of Qwen 2.
"""

import copy
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from llama_cpp_py_sync import _cffi_bindings as bindings

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM, OURS = os.environ.get("TRAIN_GPT", "./train_gpt"), os.environ.get("OURS", "build/test/ours")
PROMPTS, GREEDY, WITH_LOGITS, POSITIONS = 200, 60, 8, 192
TOLERANCE = 1e-4  # of the largest logit
GELU_TOLERANCE = 1e-3  # of a GPT-2: llama.cpp looks GELU up in a table of fp16

ffi, lib = bindings.ffi, bindings.get_lib()
said = []


@ffi.callback("void(enum ggml_log_level, const char *, void *)")
def listen(level, text, _):
    said.append(ffi.string(text).decode(errors="replace"))


class Theirs:
    """A GGUF in llama.cpp, with fp32 keys and values."""

    def __init__(self, path, adapter=None, threads=1):
        said.clear()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if self.model == ffi.NULL:
            raise SystemExit(f"llama.cpp does not load {path}:\n" + "".join(said))
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.count = lib.llama_vocab_n_tokens(self.vocabulary)
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
        settings.type_k = settings.type_v = 0  # fp32
        settings.flash_attn_type = 0
        settings.n_threads = settings.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, settings)
        assert self.context != ffi.NULL, "".join(said)
        if adapter is not None:
            lora = lib.llama_adapter_lora_init(self.model, str(adapter).encode())
            assert lora != ffi.NULL, "".join(said)
            lib.llama_set_adapters_lora(self.context, ffi.new("struct llama_adapter_lora *[]", [lora]), 1,
                                        ffi.new("float[]", [1.0]))

    def close(self):
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def tokens(self, text):
        raw = text.encode()
        out = ffi.new("llama_token[]", len(raw) + 16)
        count = lib.llama_tokenize(self.vocabulary, raw, len(raw), out, len(raw) + 16, True, True)
        return list(out[0:count])

    def step(self, tokens, whole=True):
        """The logits of the token that follows; whole=False: as a pointer."""
        ids = ffi.new("llama_token[]", tokens)  # a batch points to them
        assert lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(tokens))) == 0, "".join(said[-8:])
        logits = lib.llama_get_logits_ith(self.context, -1)
        return ffi.unpack(logits, self.count) if whole else logits

    def begin(self, tokens):
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        return self.step(tokens)


def largest_difference(ours, theirs):
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, ours))


def prompts(seed):
    """Lines of odd text. Characters are composed: llama.cpp composes none for Qwen."""
    words = ["the", "The", "fox", "it's", "don't", "I'LL", "x1", "2024", "3", "1234567", "éa", "Straße", "狐",
             "日本語", "🦊", "a_b", "…", "--", "!?", "(", "\n", "\n\n", "\t", "  ", "   ", "<|end|>", "[note]",
             "naïve", "ß", "Ω", "и", "ش", "0.5", "e=mc²", "\r\n", "<b>", "&"]
    draw = random.Random(seed)
    texts = ["Once upon a time", "a", "1", "  two blanks", "line\nbreak", "x" * 40]
    while len(texts) < PROMPTS:
        text = draw.choice(["", " "]).join(draw.choice(words) for _ in range(draw.randint(1, 14)))
        texts += [text] if text.strip() else []
    return texts


def command(*arguments, **more):
    done = subprocess.run([str(one) for one in arguments], capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, arguments))}:\n{done.stderr}")
    return done.stdout


def ours_of(model, texts, count, logits):
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    return [json.loads(line) for line in command(OURS, "run", model, count, logits, input=lines).splitlines()]


def compare(name, model, folder, texts=None, adapter=None, merged=None):
    """The model in `model` and its GGUF; with adapter: the GGUF of its base, and of the adapters."""
    texts = texts or prompts(1)
    tolerance = GELU_TOLERANCE if name.startswith("gpt2") else TOLERANCE
    expected = ours_of(model, texts, GREEDY, WITH_LOGITS)
    rows = []
    for kind in ["f32", "f16", "bf16", "q8_0"]:
        path = folder / f"{name}-{kind}.gguf"
        if adapter is None:
            command(PROGRAM, "export", "--from", model, "--to", path, "--type", kind)
            theirs = Theirs(path)
        else:
            alone = folder / f"{name}-{kind}-lora.gguf"
            command(PROGRAM, "export", "--from", adapter, "--to", path, "--type", kind)
            command(PROGRAM, "export", "--from", model, "--to", alone, "--type", kind, "--merge", "off")
            theirs = Theirs(path, alone)
        wrong = other = 0
        worst = 0.0  # of the logits behind a prompt, and of how much lower the token lies that we choose
        for text, one in zip(texts, expected, strict=True):
            if theirs.tokens(text) != one["tokens"]:
                wrong += 1
                continue
            if not one["logits"] and (kind != "f32" or theirs.count > 10000):
                continue  # of large vocabularies few, which takes minutes otherwise
            logits = theirs.begin(one["tokens"])
            if one["logits"]:
                worst = max(worst, largest_difference(one["logits"], logits))
            for token in one["greedy"] if kind == "f32" else []:
                best = max(logits)
                other += logits[token] != best
                worst = max(worst, (best - logits[token]) / abs(best))
                logits = theirs.step([token])
        theirs.close()
        path.unlink()
        rows.append(worst)
        if kind == "f32" and not (wrong == 0 and worst <= tolerance):
            raise SystemExit(f"{name}: {wrong} of {len(texts)} prompts have other tokens, {other} other greedy "
                             f"tokens, logits differ by {worst:.2g} of the largest")
        ties = other if kind == "f32" else ties
    print(f"{name:28} {len(texts)} prompts, {GREEDY} tokens each, {ties} of them ties; logits: " +
          ", ".join(f"{kind} {value:.1e}" for kind, value in zip(["f32", "f16", "bf16", "q8_0"], rows)), flush=True)


# ---- Models ---------------------------------------------------------------------------

LLAMA = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100,
         "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
MODELS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 3, "n_inner": 100, "n_positions": POSITIONS},
    "llama": LLAMA | {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "llama biases, llama3": LLAMA | {
        "model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64}},
    "llama linear": LLAMA | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama yarn": LLAMA | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": YARN},
    "mistral": LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 40, "sliding_window": 4096,
                        "hidden_size": 64, "intermediate_size": 96},
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2 yarn": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4,
                           "rope_scaling": YARN | {"beta_fast": 16.0, "attention_factor": 1.1}},
    "qwen3": LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 96},
    "qwen3 linear": LLAMA | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 128, "rope_theta": 1e6,
                             "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def tokenizers(folder):
    """The reference tokenizer in each way of cutting that has a name, and those that are given."""
    plain = json.loads((ROOT / "test/reference/tokenizer.json").read_text())
    kinds = json.loads((ROOT / "test/reference/tokenizer_kinds.json").read_text())
    made = {"gpt2": plain}
    for name in ["qwen2", "llama3", "smollm", "prepend"]:
        root = copy.deepcopy(plain)
        root.update(kinds[name]["file"])
        root["model"].update(kinds[name]["model"])
        made[name] = root
    for name, root in made.items():
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_text(json.dumps(root))
    given = [pathlib.Path(one) for one in os.environ.get("TOKENIZERS", "").split()]
    return [folder / name for name in made], given


def rows_of(tokenizer):
    root = json.loads((tokenizer / "tokenizer.json").read_text())
    ids = [one["id"] for one in root["added_tokens"]] + list(root["model"]["vocab"].values())
    return max(ids) + 1


def make(folder, name, config, tokenizer, seed):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    command(OURS, "make", path, tokenizer, folder / name, seed)
    return folder / name


def trained(folder, tokenizer):
    """A model that is trained here with a tokenizer that is trained here, and adapters for it."""
    text = "The quick fox jumps over the lazy dog. It's 2024, and 17 foxes ran. " * 400
    (folder / "text.txt").write_text("".join(f"{i}: {text[i:i + 300]}\n" for i in range(0, 20000, 290)))
    (folder / "config.json").write_text(json.dumps(MODELS["llama"] | {"vocab_size": rows_of(tokenizer)}))
    common = ["--data", folder / "text.txt", "--tokenizer", tokenizer, "--seq-len", 64, "--micro-batch", 4,
              "--optimizer", "ddp", "--val-batches", "none", "--sample-tokens", "none", "--device", "cpu"]
    command(PROGRAM, "--model", folder / "config.json", "--lr", "0.01", "--tokens", "40k", *common,
            "--out", folder / "run")
    base = next((folder / "run/checkpoints").glob("commit-*")) / "model"
    command(PROGRAM, "--finetune", base, "--lora-rank", 4, "--lr", "0.02", "--tokens", "10k", *common,
            "--out", folder / "tuned")
    return base, next((folder / "tuned/checkpoints").glob("commit-*")) / "model"


def sampled_alike(model, folder):
    """`train_gpt sample --temperature 0` writes what llama.cpp does."""
    text = "The quick"
    path = folder / "sampled.gguf"
    command(PROGRAM, "export", "--from", model, "--to", path, "--type", "f32")
    theirs = Theirs(path)
    logits, raw = theirs.begin(theirs.tokens(text)), b""
    piece = ffi.new("char[]", 256)
    for _ in range(GREEDY):
        best = max(range(len(logits)), key=logits.__getitem__)
        count = lib.llama_token_to_piece(theirs.vocabulary, best, piece, 256, 0, False)
        raw += ffi.buffer(piece, count)[:]
        if lib.llama_vocab_is_eog(theirs.vocabulary, best):
            break
        logits = theirs.step([best])
    theirs.close()
    ours = command(PROGRAM, "sample", "--from", model, "--temperature", "0", "--prompt", text, "--sample-tokens", GREEDY)
    if text + raw.decode() not in ours:
        raise SystemExit(f"sample writes\n{ours}\nand llama.cpp\n{text}{raw.decode()}")
    print(f"sample and llama.cpp go on with: {raw.decode()[:60]!r}")


def answer(path, text):
    """What follows TEXT."""
    theirs = Theirs(path, threads=1)
    began, count, raw, piece = time.perf_counter(), 0, b"", ffi.new("char[]", 256)
    logits = theirs.begin(theirs.tokens(text))
    while count < 128:
        best = max(range(len(logits)), key=logits.__getitem__)
        if lib.llama_vocab_is_eog(theirs.vocabulary, best):
            break
        raw += ffi.buffer(piece, lib.llama_token_to_piece(theirs.vocabulary, best, piece, 256, 0, False))[:]
        count += 1
        logits = theirs.step([best])
    print(f"{raw.decode(errors='replace')}\n({count} tokens in {time.perf_counter() - began:.1f} s)")


def main():
    lib.llama_log_set(listen, ffi.NULL)
    lib.llama_backend_init()
    if sys.argv[1:2] == ["answer"]:
        answer(*sys.argv[2:])
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made, given = tokenizers(folder)
        for i, (label, config) in enumerate(MODELS.items()):
            tokenizer = made[i % len(made)]
            rows = rows_of(tokenizer) + i % 3  # rows without a token are normal
            model = make(folder, f"model-{i}", config | {"vocab_size": rows}, tokenizer, i + 1)
            compare(f"{label}, {tokenizer.name}", model, folder)
        for tokenizer in given:
            config = MODELS["qwen3"] | {"vocab_size": rows_of(tokenizer), "hidden_size": 32}
            compare(f"qwen3, {tokenizer.name}", make(folder, f"given-{tokenizer.name}", config, tokenizer, 9), folder)
        base, tuned = trained(folder, made[0])
        compare("trained here", base, folder)
        compare("adapters, merged", tuned, folder)
        compare("adapters, a GGUF of their own", tuned, folder, adapter=base)
        sampled_alike(base, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
