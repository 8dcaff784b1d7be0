"""prepare against plain definitions of what it makes of documents and records."""

import gzip
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet

from tokenizer import sources
from testing import ROOT, TOKENIZER, DirectoryTest, reference_tokenizer, small_blocks

END = "<|endoftext|>"
WORDS = "the cat saw a ship upon the sea, and naïve children sang — 12 songs.\n".split(" ")


def stories(count: int, seed: int = 1) -> list[str]:
    """Texts of 1 to 60 words; none of them begins or ends with a line end."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))).strip() + "." for _ in range(count)]


def is_held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64 < fraction


class Texts(DirectoryTest):
    def expected(self, texts: list[str], fraction: float) -> tuple[list[int], list[int]]:
        """The tokens of training and validation."""
        tokenizer, sides = reference_tokenizer(), ([], [])
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            sides[is_held_out(text, fraction)].extend([*ids, tokenizer.token_to_id(END)])
        return sides

    def check(self, path: Path, texts: list[str], *options, fraction: float = 0.3):
        train, held_out = self.expected(texts, fraction)
        for size in (500, 1 << 19):
            prefix = f"{path.name}{size}"
            with small_blocks(size):
                out = self.prepare(prefix, "--val-fraction", fraction, *options, path)
            self.assertIn(f"{len(texts)} documents: {len(train)} tokens to train on, {len(held_out)} for validation", out)
            self.assertEqual(self.tokens(prefix, "train")[0], train)
            self.assertEqual(self.tokens(prefix, "val")[0], held_out)

    def test_documents_stay_in_order_and_their_hash_decides_the_side(self):
        texts = stories(200)
        self.check(self.write("a.txt", f"\n{END}\n".join(texts)), texts)

    def test_copies_are_on_one_side(self):
        texts = stories(40) * 3
        self.check(self.write("a.txt", f"\n{END}\n".join(texts)), texts)

    def test_line_ends_of_windows(self):
        texts = stories(40)
        self.check(self.write("a.txt", f"\r\n{END} \r\n".join(texts)), texts)

    def test_blank_lines_separate(self):
        texts = [text.replace("\n", " ") for text in stories(40)]
        self.check(self.write("a.txt", "\n \n\n".join(texts)), texts, "--separator", "blank-line")

    def test_formats_agree(self):
        texts = stories(60)
        records = [json.dumps({"text": text, "other": 1}) for text in texts]
        array = "[" + ",\n ".join(records) + "]\n"
        self.check(self.write("a.jsonl", "\n".join(records)), texts)
        self.check(self.write("a.json", array), texts)
        self.check(self.write("b.jsonl.gz", gzip.compress("\n".join(records).encode())), texts)
        table = pyarrow.table({"other": [1] * len(texts), "text": texts})
        pyarrow.parquet.write_table(table, self.directory / "a.parquet", row_group_size=7)
        self.check(self.directory / "a.parquet", texts)

    def test_the_bytes_of_a_file_say_what_it_is_and_not_its_name(self):
        texts = stories(30)
        lines = "\n".join(json.dumps({"text": text}) for text in texts).encode()
        array = b"[\n " + b",\n".join(lines.split(b"\n")) + b"]"
        for name, data in (("a.JSONL", lines), ("b", lines), ("c.txt", b"\n" + lines), ("d.csv", array), ("e.gz", gzip.compress(lines)),
                           ("f.jsonl", array), ("g", gzip.compress(array)), ("h.jsonl", gzip.compress(lines))):
            self.check(self.write(name, data), texts)
            out = self.prepare("again" + name, self.directory / name)
            self.assertEqual("begins with a JSON record" in out, name[-5:].lower() != "jsonl", name)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), self.directory / "table")
        self.check(self.directory / "table", texts)
        for number, text in enumerate(("{}\nno record", "{not one}", '["a", "list"]', f'{END}\n{{"a": 1}}\n', "[", "[3]: see below")):
            out = self.prepare(f"text{number}", self.write(f"{number}.txt", text))
            self.assertNotIn("begins with a JSON record", out)
        self.assertIn("git lfs pull", self.refused(self.write("p.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")))

    def test_a_byte_order_mark_is_no_part_of_json(self):
        texts = stories(30)
        records = [json.dumps({"text": text}) for text in texts]
        self.check(self.write("a.json", "\ufeff[" + ",".join(records) + "]"), texts)
        self.check(self.write("b.jsonl", "\ufeff" + "\n".join(records)), texts)
        self.check(self.write("c.json", "\ufeff" + "\n".join(records)), texts)

    def test_a_long_document_is_cut_and_stays_on_one_side(self):
        texts, tokenizer = stories(6), reference_tokenizer()
        for name, unit in (("words", "word and "), ("lines", "word and\n")):
            long = (unit * 900).strip()
            path = self.write(f"{name}.txt", f"\n{END}\n".join([texts[0], long, *texts[1:]]))
            with mock.patch.object(sources, "DOCUMENT_BYTES", 2000):
                out = self.prepare(name, "--val-fraction", 0.5, path)
            self.assertIn("7 documents", out)
            found = [tokenizer.decode(self.tokens(name, side)[0], skip_special_tokens=False) for side in ("train", "val")]
            self.assertEqual(sum(text.count(long) for text in found), 1)
            self.assertEqual(sum(text.count(END) for text in found), 7)

    def test_a_long_line_ends_a_document_wherever_it_is_read_in_two(self):
        for before in range(1970, 2003):
            line = ("word and " * 250)[:before] + END
            path = self.write(f"{before}.txt", line + "\nthe next\n")
            with mock.patch.object(sources, "DOCUMENT_BYTES", 2000):
                parts = list(sources.text_parts(path, sources.SEPARATORS["endoftext"]))
            self.assertEqual([separated for _, more, separated in parts if not more], [True, False], before)
            self.assertEqual(b"".join(data for data, _, _ in parts), line[:before].encode() + b"the next\n", before)

    def test_the_end_of_a_longest_document_is_found(self):
        for before in range(1970, 1988):
            path = self.write("end.txt", "w" * before + END)  # no line end stands behind it
            with mock.patch.object(sources, "DOCUMENT_BYTES", 2000):
                self.assertEqual(list(sources.text_parts(path, sources.SEPARATORS["endoftext"])), [(b"w" * before, False, True)], before)

    def test_a_member_may_have_any_name(self):
        path = self.write("a.jsonl", json.dumps({"text": "a story", "{x}": 1, "{": 2}))
        self.assertIn("ignored members: {x} in 1 record, { in 1 record\n", self.prepare("braces", "--val-fraction", 0, path))

    def test_one_document_is_said(self):
        out = self.prepare("one", self.write("a.txt", "one story, never divided\n"))
        self.assertIn("a.txt: one document, because no line <|endoftext|> divides it", out)
        self.assertIn("nothing is held out for validation", out)

    def test_a_document_that_is_held_out_leaves_nothing_to_train_on(self):
        text = next(text for text in stories(200) if is_held_out(text, 0.1))
        out = self.prepare("one", "--val-fraction", 0.1, self.write("a.txt", text))
        self.assertIn("nothing is left to train on", out)

    def test_empty_documents_are_counted(self):
        texts = stories(3)
        out = self.prepare("text", self.write("a.txt", f"{texts[0]}\n{END}\n{END}\n\n{END}\n{texts[1]}\n{END}\n{texts[2]}\n{END}\n"))
        self.assertIn("3 documents", out)
        self.assertIn("2 documents were left out, because they are empty", out)
        lines = "\n".join(json.dumps({"text": text}) for text in [texts[0], "", texts[1], ""])
        self.assertIn("2 documents were left out, because they are empty", self.prepare("json", self.write("a.jsonl", lines)))
        self.assertNotIn("empty", self.prepare("full", self.write("b.txt", f"{texts[0]}\n{END}\n{texts[1]}\n{END}\n")))

    def test_bytes_that_are_not_utf8_are_counted(self):
        out = self.prepare("odd", self.write("a.txt", b"caf\xe9\n<|endoftext|>\nfine\n"))
        self.assertIn("1 document had bytes that are not UTF-8: each of these is a token", out)

    def test_it_runs_from_any_directory_with_any_number_of_threads(self):
        path = self.write("a.txt", f"\n{END}\n".join(stories(9000)))  # some tasks
        self.prepare("here", path)
        command = [sys.executable, "-m", "tokenizer.prepare", "--tokenizer", TOKENIZER, "--threads", "2", "--out", "there", path]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.files("there"), self.files("here"))


class Cases(DirectoryTest):
    """Odd bytes, marks, lines and numbers: test_data.c asks train_gpt for the same."""

    def test_prepare_and_train_gpt_agree(self):
        for number, case in enumerate(json.loads((ROOT / "test/reference/text_cases.json").read_text())):
            with self.subTest(case["name"]):
                data = case["bytes"].replace("@", "[" * 3000 + "]" * 3000).encode("latin-1")
                path = self.write("a.jsonl" if case["records"] else "a.txt", data)
                if "refused" in case:
                    self.assertIn(case["refused"], self.refused(path))
                    continue
                out = self.prepare(f"case{number}", "--val-fraction", 0, path)
                self.assertEqual(self.tokens(f"case{number}", "train")[0], case["ids"])
                for key, words in (("odd", "had bytes that are not UTF-8"), ("spelling", "special tokens as text, such as"), ("empty", "empty")):
                    said = [line for line in out.splitlines() if words in line]
                    self.assertEqual([int(line.split()[0]) for line in said], [case[key]] if key in case else [], out)


class Ends(DirectoryTest):
    def test_the_end_is_what_the_files_beside_the_tokenizer_say(self):
        path, texts = self.write("a.jsonl", '{"text": "the cat</s>"}\n{"text": "a hat"}\n'), ["the cat", "a hat"]
        home = self.directory / "bpe"
        home.mkdir()
        (home / "tokenizer.json").write_text("\ufeff" + (TOKENIZER / "tokenizer.json").read_text().replace(END, "</s>"))
        self.assertIn("has no token <|endoftext|>, and neither", self.refused("--tokenizer", home, path))
        expected = [id for text in texts for id in (*reference_tokenizer().encode(text).ids, 0)]
        for number, (name, config) in enumerate((("tokenizer_config.json", {"eos_token": "</s>"}), ("config.json", {"eos_token_id": 0}),
                                                 ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}),
                                                 ("generation_config.json", {"eos_token_id": [0, 400]}))):
            (home / name).write_text(json.dumps(config))
            self.prepare(f"end{number}", "--tokenizer", home, "--val-fraction", 0, path)
            self.assertEqual(self.tokens(f"end{number}", "train")[0], expected)
            self.prepare(f"file{number}", "--tokenizer", home / "tokenizer.json", "--val-fraction", 0, path)
            self.assertEqual(self.tokens(f"file{number}", "train")[0], expected)
            (home / name).write_text(json.dumps({"eos_token": "</p>", "eos_token_id": 1}))
            self.assertIn("names another", self.refused("--tokenizer", home, path))
            (home / name).unlink()

    def test_the_token_in_front_of_a_text_begins_each_document_once(self):
        home = self.directory / "front"
        home.mkdir()
        root = json.loads((TOKENIZER / "tokenizer.json").read_text())
        texts = ["the cat", "<|end|>saw a ship", "a <|end|> song", "<|end|>sang"]
        for place, plain in ((texts, "a.jsonl"), ([text.removeprefix("<|end|>") for text in texts], "b.jsonl")):
            self.write(plain, "".join(json.dumps({"text": text}) + "\n" for text in place))
        (home / "tokenizer.json").write_text(json.dumps(root))
        self.prepare("without", "--tokenizer", home, "--val-fraction", 0, self.directory / "b.jsonl")
        single = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        root["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
                                  "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [400], "tokens": ["<|end|>"]}}}
        (home / "tokenizer.json").write_text(json.dumps(root))
        self.prepare("with", "--tokenizer", home, "--val-fraction", 0, self.directory / "a.jsonl")
        self.assertIn("belongs to token files of another token in front of a text (None, now <|end|>)",
                      self.refused("--out", self.directory / "without", "--tokenizer", home, "--val-fraction", 0, self.directory / "b.jsonl"))
        expected, begins = [], True
        for token in self.tokens("without", "train")[0]:
            expected += [400, token] if begins else [token]
            begins = token == 0
        self.assertEqual(self.tokens("with", "train")[0], expected)

    def test_another_end_is_another_request(self):
        path, home = self.write("a.jsonl", '{"text": "the cat"}'), self.directory / "bpe"
        home.mkdir()
        (home / "tokenizer.json").write_text((TOKENIZER / "tokenizer.json").read_text().replace(END, "</s>"))
        for end in ("</s>", "<|end|>"):
            (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
            code, _, errors = self.run_prepare("--tokenizer", home, "--out", self.directory / "x", path)
            self.assertEqual(code, 0 if end == "</s>" else 2)
        self.assertIn("another end of text (</s>, now <|end|>)", errors)


PROMPT = ("Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
          "### Instruction:\n{instruction}\n\n### Response:\n")
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")


class Records(DirectoryTest):
    def setUp(self):
        super().setUp()
        self.tokenizer = reference_tokenizer()
        self.end = self.tokenizer.token_to_id(END)
        draw = random.Random(3)
        self.records = [{"instruction": instruction, "input": draw.choice(["", more]), "output": draw.choice(["", output, output])}
                        for instruction, more, output in zip(stories(80, 4), stories(80, 5), stories(80, 6))]
        self.path = self.write("a.jsonl", "\n".join(map(json.dumps, self.records)))

    def document(self, record: dict) -> tuple[list[int], list[int]]:
        """Ids and mask: of the answer and its end, every token is to be predicted; of the prompt none."""
        prompt = (PROMPT_WITH_INPUT if record["input"] else PROMPT).format(**record)
        read, answer = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, record["output"]))
        return [*read, *answer, self.end], [0] * len(read) + [1] * len(answer) + [1]

    def test_only_answers_are_predicted(self):
        with small_blocks(2000):
            self.prepare("masked", "--template", "alpaca", "--val-fraction", 0, self.path)
        ids, mask = [], []
        for record in self.records:
            more, counts = self.document(record)
            ids += more
            mask += counts
        self.assertEqual(self.tokens("masked", "train"), (ids, mask))

    def test_each_padded_record_is_one_sequence(self):
        for length in (170, 250, 1000):  # some records are cut within the prompt, some within the answer, or none is
            ids, mask, left_out = [], [], 0
            for record in self.records:
                more, counts = self.document(record)
                more, counts = more[:length], [0, *counts[1:length]]
                if not any(counts):
                    left_out += 1
                    continue
                ids += more + [self.end] * (length - len(more))
                mask += counts + [0] * (length - len(counts))
            with small_blocks(2000):
                out = self.prepare(f"to{length}", "--template", "alpaca", "--pad", length, "--val-fraction", 0, self.path)
            self.assertEqual(self.tokens(f"to{length}", "train"), ([*ids, self.end], [*mask, 0]))
            self.assertEqual(f"{left_out} documents were left out, because nothing" in out, left_out > 0)
        why = f"; {len(self.records)} documents were left out, because nothing"
        self.assertIn(why, self.refused("--template", "alpaca", "--pad", 8, "--val-fraction", 0, self.path))

    def test_a_completion_follows_its_prompt_as_it_is(self):
        ids, mask, lines = [], [], []
        for record in self.records:
            prompt, text = record["instruction"], " " + record["output"]
            read, answer = (self.tokenizer.encode(part, add_special_tokens=False).ids for part in (prompt, text))
            ids += [*read, *answer, self.end]
            mask += [0] * len(read) + [1] * len(answer) + [1]
            lines.append({"prompt": prompt, "completion": text, "id": 3})
        path = self.write("b.jsonl", "\n".join(map(json.dumps, lines)))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), self.directory / "b.parquet")
        out = self.prepare("lines", "--template", "completion", "--val-fraction", 0, path)
        self.assertIn(f"ignored members: id in {len(lines)} records", out)
        self.prepare("table", "--template", "completion", "--val-fraction", 0, self.directory / "b.parquet")
        self.assertEqual(self.tokens("lines", "train"), (ids, mask))
        self.assertEqual(self.tokens("table", "train"), (ids, mask))

    def test_a_record_without_the_field_is_told_how_it_is_read(self):
        pairs, listed = {"prompt": "x", "completion": "y"}, [{"role": "assistant", "content": "y"}]
        for record, template, words in (
            (pairs, "plain", "no field 'text'; it has 'prompt', 'completion': --template completion or --template chat read it\n"),
            (pairs | {"completion": listed}, "plain", ": --template chat reads it\n"),
            (pairs | {"completion": None}, "plain", "; it has 'prompt', 'completion': --field prompt reads it\n"),
            (pairs | {"prompt": listed}, "completion", "field 'prompt' holds list, not text: --template chat reads it\n"),
            ({"messages": []}, "alpaca", "no field 'instruction'; it has 'messages': --template chat reads it\n"),
            ({"instruction": "x", "output": "y"}, "completion",
             "no field 'prompt'; it has 'instruction', 'output': --template alpaca or --template chat read it\n"),
            ({"instruction": "x", "output": 3}, "completion", "no field 'prompt'; it has 'instruction', 'output'\n"),
            ({"id": 3, "body": "x"}, "plain", "no field 'text'; it has 'id', 'body': --field body reads it\n"),
            ({"a b": "x"}, "plain", ": --field 'a b' reads it\n"),
            ({"a\nb": "x"}, "plain", "it has 'a\\nb'\n"),
            ({f"f{number}": 0 for number in range(10)}, "plain", "'f7', ...\n"),
            ({"id": 3}, "plain", "no field 'text'; it has 'id'\n"),
        ):
            self.assertIn(words, self.refused("--template", template, self.write("a.jsonl", json.dumps(record))))
            if template == "plain" and None not in record.values():
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), self.directory / "a.parquet")
                self.assertIn(words.replace("field 'text'", "column 'text'"), self.refused(self.directory / "a.parquet"))
        for names, template, words in ((("prompt", "chosen"), "chat", "no column 'completion'; it has 'prompt', 'chosen'\n"),
                                       (("system", "question"), "chat", "no column 'messages'; it has 'system', 'question'\n"),
                                       (("system", "instruction", "output"), "completion", "'system', 'instruction', 'output': --template alpaca or")):
            options = sources.Options(template=template)
            pyarrow.parquet.write_table(pyarrow.table({name: ["x"] for name in names}), self.directory / "b.parquet")
            with self.assertRaises(sources.InputError) as caught:
                list(sources.table_records(self.directory / "b.parquet", options))
            self.assertIn(words, str(caught.exception) + "\n")

    def test_what_is_no_record_is_refused(self):
        for line, part in (('{"instruction": "x"}', "no field 'output'"), ("[1]", "must be an object"), ("{", "a.jsonl"),
                           ('{"instruction": "x", "output": 2}', "field 'output' holds int, not text"),
                           ('{"instruction": null, "output": "y"}', "field 'instruction' holds NoneType, not text"),
                           ('{"instruction": "x", "input": [1], "output": "y"}', "field 'input' holds list, not text"), ("3", "must be an object"), ('"x"', "must be an object")):
            self.write("a.jsonl", line)
            self.assertIn(part, self.refused("--template", "alpaca", self.path))
        self.write("a.jsonl", '{"text": 5}')
        self.assertIn("holds int, not text", self.refused(self.path))

    def test_the_place_of_a_bad_record_is_named(self):
        self.write("a.jsonl", '{"text": "x"}\n\n{"text": \n{"text": "x"}')
        self.assertIn("a.jsonl, line 3: ", self.refused(self.path))
        self.write("a.jsonl", '{"text": "x"}\n\n{"body": "x"}')
        self.assertIn("a.jsonl, line 3: the record has no field 'text'", self.refused(self.path))
        path = self.write("a.json", '[{"text": "x"}, {"body": "x"}]')
        self.assertIn("a.json, record 2: ", self.refused(path))
