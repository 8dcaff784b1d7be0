"""Makes test/reference/chats.json: the tokens and masks that transformers gives to the chats of test/tokenizer/chats.py.

    python dev/reference/make_chats.py            writes the file
    python dev/reference/make_chats.py --check    recomputes it and compares; exit 1 where it differs

Needs transformers (no torch) and tokenizer/requirements.txt. For each template: SHA-256 of the
tokens and masks of all chats, and those of a short one.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/tokenizer")]

from chats import NAMES, TEMPLATES, chats, digest, write_tokenizer  # noqa: E402

OUT = ROOT / "test/reference/chats.json"


def encode(name: str) -> list[tuple[list[int], list[int]]]:
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), TEMPLATES[name])
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{directory}/tokenizer.json", chat_template=TEMPLATES[name], **NAMES)
    found = [tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
             for messages in chats()]
    return [(chat["input_ids"], chat["assistant_masks"]) for chat in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = {}
    for name in TEMPLATES:
        encoded = encode(name)
        short = min((number for number, (ids, mask) in enumerate(encoded) if sum(mask) > 5), key=lambda number: len(encoded[number][0]))
        made[name] = {"sha256": digest(encoded), "tokens": sum(len(ids) for ids, _ in encoded), "learned": sum(sum(mask) for _, mask in encoded),
                      "chat": short, "ids": encoded[short][0], "mask": "".join(map(str, encoded[short][1]))}
    text = json.dumps(made) + "\n"
    if parser.parse_args().check:
        return int(OUT.read_text() != text)
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
