"""Compares the tokens of train_gpt with those of the `tokenizers` library.

    python dev/reference/check_tokenizers.py DIRECTORY... [--count 20000] [--program ./train_gpt]

Each DIRECTORY has a tokenizer.json. The program tokenizes COUNT random strings as lines of JSON, and each must have the ids that the
library gives, where the texts of special tokens are text, with the token in front that the file's post-processor puts there. Strings are put together from what tokenizers treat differently: contractions
in both cases, digits of many scripts, spaces of all kinds, combining marks, characters that compose or must not, and texts of tokens.

Needs tokenizer/requirements.txt. Exit code 1 where an id differs.
"""

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer  # noqa: E402

from tokenizer import vocabulary  # noqa: E402

WORDS = "the The THE fox Fuß naïve Ångström café Straße ﬁne Лиса лисы νερό ΝΕΡΌ שלום سلام हिन्दी ไทย 日本語 川の 한국어 中文字符".split()
PARTS = [
    *WORDS, *[" " + word for word in WORDS],
    "'s", "'S", "'t", "'RE", "'ve", "'lL", "'d", "'ſ", "’s", "don't", "I'M", "'", "''",
    *"0 1 12 123 1234 12345678 3.14 ½ ² Ⅷ ٣٤٥ ४५ 四 𝟘𝟙 ①".split(),
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", "\v", "\f", "\x85", "\u00a0", "\u1680", "\u180e", "\u2003", "\u2028", "\u202f",
    "\u205f", "\u3000", "\u200b", "\u200d", "\ufeff",
    *".,;:!?()[]{}<>-_=+*&^%$#@~`|\\/\"", "...", "!!!\n", "--", "://", "<|", "|>",
    "e\u0301", "E\u0300", "o\u0323\u0302", "o\u0302\u0323", "\u0301", "\u0300\u0323", "\u0958", "\u212b", "\u2126", "\u1e9b\u0323", "\u1100\u1161", "\u1100\u1161\u11a8",
    "\uac00\u11a8", "\u0915\u093c", "\u0344", "\u1111\u1171\u11b6", "q\u0307\u0323", "\u00e9\u0301", "a\u0315\u0300\u05ae\u0062", "\u2adc", "\U0001d15e",
    "\U0001f600", "\U0001f468\u200d\U0001f469", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea", "\ue000", "\U0010ffff", "\x00", "\x1b", "\x7f", "\ufffd",
]


def strings(count: int, tokens: list[str], generator: random.Random) -> list[str]:
    """Texts of 1 to 24 parts, or of random characters; none is empty."""
    parts, found = PARTS + tokens, []
    while len(found) < count:
        if generator.random() < 0.8:
            text = "".join(generator.choices(parts, k=generator.randrange(1, 25)))
        else:
            ranges = [(1, 0x250), (0x300, 0x600), (0x900, 0xd00), (0x1100, 0x2400), (0x3000, 0x3200), (0xac00, 0xd7a4), (0xf900, 0xfb00)]
            text = "".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(generator.randrange(1, 40)))
        found.append(text)
    return found


def of_program(program: str, directory: Path, texts: list[str], end_text: str, end: int) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as scratch:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        shutil.copy(directory / "tokenizer.json", scratch)
        Path(scratch, "tokenizer_config.json").write_text(json.dumps({"eos_token": end_text}))
        subprocess.run([program, "tokenize", "--tokenizer", scratch, "--out", f"{scratch}/a"], input=lines.encode(), check=True,
                       stdout=subprocess.DEVNULL)
        data = Path(f"{scratch}/a_train_00000.bin").read_bytes()
    token_bytes, _, _, count = struct.unpack_from("<IIIQ", data, 12)  # tokenizer/token_file.h
    documents = [[]]
    for number, in struct.iter_unpack("<I" if token_bytes == 4 else "<H", data[256 : 256 + count * token_bytes]):
        if number == end:  # behind each document
            documents.append([])
        else:
            documents[-1].append(number)
    documents.pop()
    return documents


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--program", default=str(ROOT / "train_gpt"))
    arguments = parser.parse_args()
    differs = 0
    for directory in arguments.directories:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
        front = vocabulary.front_of(tokenizer)
        end = vocabulary.END_OF_TEXT if vocabulary.END_OF_TEXT in added else next((token for token in added if token != front), added[0])
        # An end mark at the end of a text is the end of a document, and so not its text; a beginning is the token in front.
        texts = [text + "." if text.rstrip().endswith(end) else text for text in strings(arguments.count, added, random.Random(7))]
        texts = ["." + text if front and text.startswith(front) else text for text in texts]
        tokenizer.encode_special_tokens = True
        expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        found = of_program(arguments.program, directory, texts, end, tokenizer.token_to_id(end))
        wrong = [i for i in range(len(texts)) if i >= len(found) or found[i] != expected[i]]
        differs += len(wrong) + (len(found) != len(texts))
        print(f"{directory}: {len(texts)} strings, {sum(map(len, expected))} tokens, {len(wrong)} strings differ")
        for i in wrong[:3]:
            print(f"    {texts[i]!r}\n    {expected[i]}\n    {found[i] if i < len(found) else None}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
