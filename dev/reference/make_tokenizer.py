"""Makes tokenizer.json, tokenizer_cases.json and tokenizer_kinds.json of test/reference.

    python dev/reference/make_tokenizer.py            writes the files
    python dev/reference/make_tokenizer.py --check    recomputes them and compares; exit 1 where they differ

Needs tokenizer/requirements.txt. The expected values are those of the `tokenizers`
library. The tokenizer is a byte-level BPE of 400 tokens, trained on SENTENCES, with
awkward added tokens: one begins with another, one is not special, one has characters that
stand for no byte.

tokenizer_cases.json:
    sum      CRC-32 of the tokenizer, as token files carry it
    encode   text, its ids, and its ids where special tokens are text like any other
    decode   ids, their text, and their text without special tokens; most are not valid UTF-8 at their ends or inside

tokenizer_kinds.json has the same tokenizer as other models have theirs: of each kind the members of the file and of its model that
are others, and texts with their ids.
"""

import argparse
import copy
import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tokenizer import vocabulary  # noqa: E402

OUT = ROOT / "test" / "reference"
SIZE = 400

SENTENCES = [
    "Once upon a time there was a small red fox who lived near the river, and every day she walked to the old mill.",
    "The miller said: \"Don't come here again!\" But the fox didn't listen; she'd heard that before, hadn't she?",
    "They're sure we've seen it, I'm told you'll agree, it's 12 miles and 340 steps to the town, or 1,000 feet.",
    "In the morning the river was quiet and the mill stood still, and there was nobody there to see the little fox.",
    "for (int i = 0; i < count; i++) {\n    total += values[i];\n}\n\nreturn total / count;",
    "Der Müller hörte den Fluß rauschen. Le renard était déjà là, près du café. Лиса жила у реки. 狐は川の近くに住んでいた。",
    "?\u180e " * 60,  # becomes one piece, and so one token: U+180E is no space
    "!\u00a3 " * 60,  # a merge of "!" with the first byte of U+0080 to U+00BF, some of which are spaces
]

HARD = [
    "The fox's mill isn't 12 miles away: they've walked 340 steps!  \"Don't,\" she said.\n\nIt's late.",
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  a  b   c    ",
    "\n",
    "\n\n\n a\n \n\tb\r\n\r\n",
    "tab\tseparated\tvalues\t",
    "I'm you're he's she'd we'll they've 'tis 's's 'S'T don''t ' s '",
    "don’t use ’s here",
    "1 12 123 1234567890 3.14159 1,000,000 2nd 0x1F ½ ² Ⅷ ٣٤٥ 四",
    "!?!? ... --- ;:,. (([[{{<<>>}}]])) @#$%^&*_+=~`|\\/",
    "\x00\x01\x02 \x1b[31m\x7f\x80\x9f \x00",
    "NUL\x00inside",
    "caf\u00e9 cafe\u0301 na\u00efve \u00dcber Stra\u00dfe \u0130stanbul",
    "\u00a0no\u00a0break\u2003em\u3000ideographic\u1680ogham\u2028line\u2029paragraph\x85next",
    "\u180emongolian \u200bzero\u200dwidth\ufeffbom \u2060",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd \U0001f1e9\U0001f1ea\u2764\ufe0f",
    "狐は川の近くに住んでいた。 中文字符 한국어 ภาษาไทย हिन्दी العربية עברית",
    "?\u180e?\u180e ?\u180e !\u00a0!\u0085!\u00a3",
    "\u0300\u0301combining first \ue000private \U0010ffff\uffff\ufffd",
    "<|endoftext|>",
    "one<|endoftext|>two <|endoftext|> three<|endoftext|><|endoftext|>",
    "<|endoftext <|endoftext|",
    "<<|end|><|end|>!<|end|>! <|end|",
    "a[note]b [note] [[note]]<|end|>[note]",
    "[note]! [note] te]! [no",
    "the caf\u00e9 bar caf\u00e9 barcaf\u00e9 ba",
    "the" * 300,
    "xyzzy" * 200 + " " * 300 + "\n" * 200 + "0123456789" * 30,
    " ".join(["a" * n for n in range(1, 30)]),
]

INVALID = [  # bytes that are not UTF-8, in every way
    "80", "BFBF", "C080", "C1BF", "C2", "C2C2A9", "C3A9C3", "E08080", "E09FBF", "E0A080", "E282", "E28241", "EDA080", "EDBFBF",
    "ED9FBF", "EFBFBF", "F0808080", "F08FBFBF", "F0908080", "F09F98", "F09F9841", "F09F41", "F48FBFBF", "F4908080", "F5808080",
    "FF", "FEFF", "41E282F09F98C3", "F09F98F09F9880", "E2E282E282ACAC",
]


def make_tokenizer():
    tokenizer = vocabulary.byte_level(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=[vocabulary.END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([
        AddedToken("<|end|>!", normalized=False), AddedToken("[note]", normalized=True),
        AddedToken("te]!", normalized=False), AddedToken("caf\u00e9 bar", normalized=False), AddedToken("\u72d0 fox", normalized=False),
    ])
    return tokenizer


def encode_cases(tokenizer, texts: list[str]) -> list[dict]:
    cases = []
    for text in texts:
        tokenizer.encode_special_tokens = False
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        cases.append({"text": text, "ids": ids, "ids_special_as_text": tokenizer.encode(text, add_special_tokens=False).ids})
    return cases


LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def cut_by(*parts: dict) -> dict:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


KINDS = {
    "qwen2": {"file": {"normalizer": {"type": "NFC"}, **cut_by(split(WORD + r"\p{N}" + REST), LETTERS)}, "model": {}},
    "llama3": {"file": cut_by(split(WORD + r"\p{N}{1,3}" + REST), LETTERS), "model": {"ignore_merges": True}},
    "smollm": {"file": cut_by({"type": "Digits", "individual_digits": True}, {**LETTERS, "use_regex": True}), "model": {}},
    # Pieces between matches, digits in runs, and no other pattern.
    "digits": {"file": cut_by({"type": "Digits", "individual_digits": False}, LETTERS), "model": {}},
    "gaps": {"file": cut_by(split(WORD + r"\p{N}" + REST), LETTERS), "model": "with_gaps"},
    # Nearly those of DeepSeek's, whose normalizer has no parts. The library's $ and ^ are at each line.
    "deepseek": {"file": {"normalizer": {"type": "Sequence", "normalizers": []}, **cut_by(
        split("[\r\n]"), split("\\s?[A-Za-z\u00b5\u00c0-\u017f]+"), split("\\s?[!-/:-~\u2018-\u201f\u3000-\u3002]+"), split(r"\s+$"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), {"type": "Digits", "individual_digits": True}, LETTERS)}, "model": {}},
    "lines": {"file": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
                       **cut_by(split(r"^\s+|^[a-t]+|[a-t \t]$"), LETTERS)}, "model": {}},
}

BLANK = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}


def metaspace(scheme: str) -> dict:
    return {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": False}}


# As SentencePiece's files are converted: Llama 2's, Mistral's newer ones, Gemma's.
CHARACTERS = {
    "prepend": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, REPLACE]}, "pre_tokenizer": None},
    "first": metaspace("first"), "always": metaspace("always"), "never": {"normalizer": REPLACE, "pre_tokenizer": None},
}
# The same with added tokens that are normalized, as <s> in files of Llama's first fine-tunes.
CHARACTERS |= {f"{name} normalized": file for name, file in CHARACTERS.items()}
NORMALIZED = {"<|endoftext|>", "[note]", "caf\u00e9 bar"}
BLANKS = [
    f"{BLANK}a {BLANK} b", f"{BLANK}", "a<|endoftext|>b <|endoftext|> c<|endoftext|>", "<|endoftext|>the", " the fox", "<0x41> A \x41",
    "\u00e9\u010d\u72d0<|end|>!caf\u00e9 bar", f"a caf\u00e9{BLANK}bar caf\u00e9 bar[note] [note]<|end|>[note]  <|endoftext|><|endoftext|>",
]


def of_characters(plain: Tokenizer) -> dict:
    """The model, and the added tokens: none of them is normalized. Letters are those that are in most sentences."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [text.replace(" ", BLANK) for text in SENTENCES[:6]]
    letters = sorted(sorted(set("".join(texts))), key=lambda one: -sum(one in text for text in texts))[:70]  # the trainer draws lots
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[vocabulary.END_OF_TEXT, *bytes_of], initial_alphabet=letters,
                                  limit_alphabet=len(letters), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    added = [token | {"normalized": False} for token in json.loads(plain.to_str())["added_tokens"]]
    return {"model": json.loads(tokenizer.to_str())["model"], "added_tokens": added}


def with_gaps(model: dict) -> dict:
    """A vocabulary in which some bytes have no token, as in SmolLM2's and others: \\r, z, and the first of every emoji."""
    lost = {"\u010d", "z", "\u00f0"}
    return {"vocab": {f"lost {token}" if lost & set(text) else text: token for text, token in model["vocab"].items()},
            "merges": [pair for pair in model["merges"] if not lost & set("".join(pair))]}


COMPOSED = [
    "e\u0301E\u0300 o\u0323\u0302o\u0302\u0323 \u0301x \u00e9\u0301", "\u1100\u1161\u11a8 \u1100\u1161 \uac00\u11a8 \u1111\u1171\u11b6",
    "\u0958\u212b\u2126\u0344\u1e9b\u0323 q\u0307\u0323 \u2adc", "cafe\u0301 bar cafe\u0301<|end|>cafe\u0301", "'S 'Re I'LL '\u017f 1234567 12\u0663\u06645\u00bd",
    " fox fox the fox340 340 3400",
]


def kind_cases(plain: Tokenizer) -> dict:
    kinds = copy.deepcopy(KINDS)
    for kind in kinds.values():
        root = json.loads(plain.to_str())
        root.update(kind["file"])
        if kind["model"] == "with_gaps":
            kind["model"] = with_gaps(root["model"])
        if "ignore_merges" in kind["model"]:  # without the last merges many tokens can only be whole pieces
            kind["model"]["merges"] = root["model"]["merges"][:60]
        root["model"].update(kind["model"])
        tokenizer = Tokenizer.from_str(json.dumps(root))
        kind["encode"] = encode_cases(tokenizer, [text for text in HARD if len(text) < 200] + COMPOSED)
    whole = of_characters(plain)
    for name, file in CHARACTERS.items():
        wanted = NORMALIZED if name.endswith("normalized") else set()
        added = [token | {"normalized": token["content"] in wanted} for token in whole["added_tokens"]]
        tokenizer = Tokenizer.from_str(json.dumps(json.loads(plain.to_str()) | whole | file | {"added_tokens": added}))
        texts = BLANKS + ([text for text in HARD if len(text) < 200] if name == "prepend" else [])
        kinds[name] = {"file": file | {"added_tokens": added}, "model": whole["model"], "encode": encode_cases(tokenizer, texts)}
    return kinds


def decode_cases(tokenizer) -> list[dict]:
    generator, size = random.Random(7), vocabulary.size(tokenizer)
    rows = [[generator.randrange(size + 3) for _ in range(generator.randrange(24))] for _ in range(30)]
    rows += [[generator.randrange(130, 260) for _ in range(24)] for _ in range(10)]  # bytes that are seldom UTF-8
    letters = set(pre_tokenizers.ByteLevel.alphabet())  # bytes that print are themselves, the others U+0100 and on, in order
    others = iter(range(256, 512))
    of_byte = [chr(byte) if chr(byte) in letters else chr(next(others)) for byte in range(256)]
    rows += [[tokenizer.token_to_id(of_byte[byte]) for byte in bytes.fromhex(text)] for text in INVALID]
    return [
        {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False), "text_without_special": tokenizer.decode(ids)}
        for ids in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    tokenizer = make_tokenizer()
    cases = {"sum": vocabulary.sum_of(tokenizer), "encode": encode_cases(tokenizer, HARD), "decode": decode_cases(tokenizer)}
    tokenizer.encode_special_tokens = False
    files = {
        "tokenizer.json": tokenizer.to_str().encode() + b"\n",
        "tokenizer_cases.json": json.dumps(cases, separators=(",", ":")).encode() + b"\n",
        "tokenizer_kinds.json": json.dumps(kind_cases(tokenizer), separators=(",", ":")).encode() + b"\n",
    }
    different = [name for name, data in files.items() if check and (OUT / name).read_bytes() != data]
    for name, data in files.items():
        if not check:
            (OUT / name).write_bytes(data)
        print(f"{name}: {len(data)} bytes" + (", differs" if name in different else ""))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
