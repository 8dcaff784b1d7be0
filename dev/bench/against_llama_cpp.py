"""How many tokens a second `train_gpt sample` and llama.cpp write with the same model, in turns.

    OURS=build/test/ours TRAIN_GPT=./train_gpt build/venv-llama-cpp/bin/python dev/bench/against_llama_cpp.py [ROUNDS]

The model has SmolLM2-135M's shape and random weights, and the tokenizer of the tests. A speed is that of
the tokens from the 17th to the 144th after a short prompt, on all cores; llama.cpp's for each --type.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/llama_cpp"))
import check  # noqa: E402

FIRST, LAST, PROMPT = 16, 144, "Once upon a time"
SHAPE = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
         "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "max_position_embeddings": 8192,
         "vocab_size": 49152, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1e5}


def ours(model):
    """Without a chance of an end: the whole texts, whose starts take equally long."""
    def seconds(count):
        began = time.perf_counter()
        text = check.command(check.PROGRAM, "sample", "--from", model, "--prompt", PROMPT, "--temperature", "0",
                             "--sample-tokens", count, "--threads", os.cpu_count())
        assert "ends after" not in text
        return time.perf_counter() - began
    return (LAST - FIRST) / -(seconds(FIRST) - seconds(LAST))


def theirs(path):
    one = check.Theirs(path, threads=os.cpu_count())
    one.begin(one.tokens(PROMPT))
    for i in range(LAST):
        if i == FIRST:
            began = time.perf_counter()
        one.step([i % 300], whole=False)
    speed = (LAST - FIRST) / (time.perf_counter() - began)
    one.close()
    return speed


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    check.lib.llama_log_set(check.listen, check.ffi.NULL)
    speeds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made, _ = check.tokenizers(folder)
        model = check.make(folder, "model", SHAPE, made[0], 1)
        for kind in ["f32", "bf16", "q8_0"]:
            check.command(check.PROGRAM, "export", "--from", model, "--to", folder / f"{kind}.gguf", "--type", kind)
        for _ in range(rounds):
            speeds.setdefault("train_gpt sample", []).append(ours(model))
            for kind in ["f32", "bf16", "q8_0"]:
                speeds.setdefault(f"llama.cpp {kind}", []).append(theirs(folder / f"{kind}.gguf"))
    print(subprocess.run([check.PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout)
    for label, values in speeds.items():
        print(f"{label:18} {statistics.median(values):6.1f} tokens/s ({min(values):.1f} .. {max(values):.1f})")
    print(json.dumps({"threads": os.cpu_count(), "tokens": [FIRST, LAST], "shape": "smollm2-135M"}))


if __name__ == "__main__":
    main()
