"""Compares the tokens and masks of chats with those of transformers, for the tokenizers and templates that models are published with.

    python dev/reference/check_chats.py DIRECTORY... [--count 1000]

Each DIRECTORY has a tokenizer.json, a tokenizer_config.json and a chat template, as downloaded from the Hub. tokenizer.prepare makes
COUNT random chats into a token file, whose tokens must be those of transformers' apply_chat_template. The masks must be those that
transformers gives to that template of test/tokenizer/chats.py which writes the same texts and marks the answers; where none does, only
tokens are compared. tokenizer.chat then makes a chat.json, and the tokens with which sample asks for each answer must be those of
apply_chat_template with add_generation_prompt, as build/test/test_sample compares them.

Needs transformers, tokenizer/requirements.txt, train_gpt, and build/test/test_sample. Exit code 1 where something differs.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/tokenizer")]

from chats import TEMPLATES, chats  # noqa: E402
from testing import read_tokens  # noqa: E402

from tokenizer import chat, prepare, vocabulary  # noqa: E402

NO_THOUGHTS = {"enable_thinking": False}


def of_prepare(directory: Path, made: list[list[dict]], length: int, scratch: Path) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each chat, in sequences of one length; shorter ones end with padding."""
    (scratch / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in made))
    if prepare.main(["--tokenizer", str(directory), "--template", "chat", "--val-fraction", "0", "--pad", str(length), "--out",
                     str(scratch / "out"), str(scratch / "chats.jsonl")]) != 0:
        sys.exit(1)
    ids, mask = read_tokens(scratch / "out_train_00000.bin")
    return [(ids[at : at + length], mask[at : at + length]) for at in range(0, len(ids) - 1, length)]


def marked_template(tokenizer: PreTrainedTokenizerFast, template: str, made: list[list[dict]]) -> tuple[str, str] | None:
    """Name and text of a template of the tests that writes what `template` writes."""
    for name, marked in TEMPLATES.items():
        one, other = (partial(tokenizer.apply_chat_template, tokenize=False, chat_template=source, **NO_THOUGHTS) for source in (template, marked))
        if name == "llama3":  # that of the tests has no date of today
            other = partial(other, date_string=chat.datetime.now().strftime("%d %b %Y"))
        with contextlib.suppress(jinja2.UndefinedError):  # a tokenizer without a bos_token
            if all(one(messages) == other(messages) for messages in made):
                return name, marked
    return None


def check_sample(directory: Path, tokenizer: PreTrainedTokenizerFast, template: str, made: list[list[dict]], scratch: Path) -> bool:
    """Answers neither begin nor end with blanks or a special token, as their tokens stand alone; and users say something, with blanks
    of ASCII around it: train_gpt trims no others."""
    for member in directory.glob("*.json"):
        shutil.copy(member, scratch)
    (scratch / "chat_template.jinja").write_text(template)
    if chat.main([str(scratch)]) != 0:
        return False
    conversations = {}
    for number, messages in enumerate(made):
        messages = messages[: len(messages) - (messages[-1]["role"] == "assistant")]
        messages = [one | {"content": f"The {number} foxes. Où?" if one["role"] == "assistant" else f" {one['content'].strip() or 'x'}\n"}
                    for one in messages]
        said = [one["content"] for one in messages]
        turns = [index for index, one in enumerate(messages) if one["role"] == "user"]
        asked = [tokenizer.apply_chat_template(messages[: index + 1], chat_template=template, add_generation_prompt=True, return_dict=True,
                                               **NO_THOUGHTS)["input_ids"] for index in turns]
        conversations[f"{number}"] = {"said": said if messages[0]["role"] == "system" else ["", *said], "asked": asked}
    (scratch / "conversations.json").write_text(json.dumps({"templates": conversations}))
    test = subprocess.run([ROOT / "build/test/test_sample", "test_conversations"], cwd=ROOT, env=os.environ | {"CHATS": str(scratch)},
                          capture_output=True, text=True)
    print(f"    sample: {len(conversations)} conversations: " + ("the same tokens" if test.returncode == 0 else test.stdout + test.stderr))
    return test.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    made, differs = chats(arguments.count), 0
    for directory in arguments.directories:
        loaded = chat.load(str(directory), vocabulary.load(str(directory)), None)
        names = {key: text for key, text in loaded.names.items() if key in ("bos_token", "eos_token")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **names)
        found = marked_template(tokenizer, loaded.source, made)
        apply = partial(tokenizer.apply_chat_template, chat_template=loaded.source, return_dict=True, **NO_THOUGHTS)
        expected = [apply(messages)["input_ids"] for messages in made]
        masks = [None] * len(made)
        if found is not None:
            date = {"date_string": chat.datetime.now().strftime("%d %b %Y")} if found[0] == "llama3" else {}
            masks = [apply(messages, chat_template=found[1], return_assistant_tokens_mask=True, **date)["assistant_masks"] for messages in made]
        length = max(map(len, expected)) + 1
        with tempfile.TemporaryDirectory() as scratch:
            written = of_prepare(directory, made, length, Path(scratch))
            wrong = [number for number, (ids, mask) in enumerate(written) if ids[: len(expected[number])] != expected[number] or
                     masks[number] is not None and mask[: len(masks[number])] != masks[number] or any(mask[len(expected[number]):])]
            print(f"{directory}: {len(written)} chats of {len(made)}, {sum(map(len, expected))} tokens, masks of "
                  f"{found[0] if found else 'nothing'}: {len(wrong)} differ")
            for number in wrong[:3]:
                print(f"    {made[number]}")
                for token, other, learned, found_learned in zip(expected[number], written[number][0], masks[number] or [], written[number][1]):
                    if token != other or learned != found_learned:
                        print(f"    expected {tokenizer.decode([token])!r} {learned}, found {tokenizer.decode([other])!r} {found_learned}")
            differs += len(wrong) + (len(written) != len(made))
            differs += not check_sample(directory, tokenizer, loaded.source, made, Path(scratch))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
