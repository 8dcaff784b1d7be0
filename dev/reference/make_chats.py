"""Makes test/reference/chats.json: the tokens and masks that transformers gives to the chats of test/tokenizer/chats.py.

    python dev/reference/make_chats.py            writes the file
    python dev/reference/make_chats.py --check    recomputes it and compares; exit 1 where it differs

Needs transformers (no torch) and tokenizer/requirements.txt. For each template: SHA-256 of the
tokens and masks of all chats, and those of a short one; and for the C side the constant texts and
what asks for each answer of a conversation.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/tokenizer")]

from chats import NAMES, SAID, TEMPLATES, chats, digest, write_tokenizer  # noqa: E402

from tokenizer import chat, vocabulary  # noqa: E402

OUT = ROOT / "test/reference/chats.json"


def encode(name: str) -> tuple[list[tuple[list[int], list[int]]], dict]:
    """Tokens and masks of all chats, and what asks for the answers of a conversation."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), TEMPLATES[name])
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{directory}/tokenizer.json", chat_template=TEMPLATES[name], **NAMES)
        pieces = chat.derive(chat.load(directory, vocabulary.load(directory), None))[0]
    apply = partial(tokenizer.apply_chat_template, tokenize=True, return_dict=True, enable_thinking=False)
    found = [apply(messages, return_assistant_tokens_mask=True) for messages in chats()]
    asked = [apply(SAID[:number], add_generation_prompt=True)["input_ids"] for number in (2, 4, 6)]
    said = [message["content"] for message in SAID]
    return [(one["input_ids"], one["assistant_masks"]) for one in found], {"pieces": pieces, "said": said, "asked": asked}


def added() -> list[dict]:
    """What the chats' tokenizer adds to that of the reference."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), "")
        before, after = (json.loads(path.read_text())["added_tokens"]
                         for path in (ROOT / "test/reference/tokenizer.json", Path(directory, "tokenizer.json")))
    return [token for token in after if token not in before]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = {}
    for name in TEMPLATES:
        encoded, conversation = encode(name)
        short = min((number for number, (ids, mask) in enumerate(encoded) if sum(mask) > 5), key=lambda number: len(encoded[number][0]))
        made[name] = {"sha256": digest(encoded), "tokens": sum(len(ids) for ids, _ in encoded), "learned": sum(sum(mask) for _, mask in encoded),
                      "chat": short, "ids": encoded[short][0], "mask": "".join(map(str, encoded[short][1])), **conversation}
    text = json.dumps({"added": added(), "templates": made}) + "\n"
    if parser.parse_args().check:
        return int(OUT.read_text() != text)
    OUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
