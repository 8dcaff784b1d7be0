"""Files that are damaged, or made to do harm: each of them is refused in one sentence."""

import gzip
import io
import json
import os
import unittest
from collections import Counter
from unittest import mock

import pyarrow
import pyarrow.parquet

from tokenizer import vocabulary
from tokenizer.sources import InputError, Options, documents
from test_documents import stories
from testing import TOKENIZER, DirectoryTest


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]


class Inputs(DirectoryTest):
    """Every damage ends in an InputError, or goes unnoticed where the format cannot notice it."""

    def read(self, name: str) -> list | None:
        """The texts of the documents; None: the file was refused."""
        try:
            return [document.text for document in documents(str(self.directory / name), Options(), Counter())]
        except InputError as error:
            self.assertIn(name, str(error))
            return None

    def test_damaged_parquet(self):
        table = pyarrow.table({"text": stories(60)})
        pyarrow.parquet.write_table(table, self.directory / "a.parquet", row_group_size=20)
        data = (self.directory / "a.parquet").read_bytes()
        for length in range(0, len(data), 61):
            self.write("a.parquet", data[:length])
            self.assertIsNone(self.read("a.parquet"))
        noticed = 0
        for at in range(0, len(data), 7):
            self.write("a.parquet", flipped(data, at, at % 8))
            noticed += self.read("a.parquet") is None
        self.assertGreater(noticed, 10)

    def test_a_column_that_is_not_there(self):
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), self.directory / "a.parquet")
        with self.assertRaisesRegex(InputError, "no column 'text'; it has 'body': --field body reads it"):
            list(documents(str(self.directory / "a.parquet"), Options(), Counter()))

    def test_packed_texts_that_end_early(self):
        text = "\n".join(stories(300)).encode()
        packed = io.BytesIO()
        with pyarrow.CompressedOutputStream(packed, "zstd") as out:
            out.write(text)
            out.flush()
            zst = packed.getvalue()
        for name, data in (("a.txt.gz", gzip.compress(text)), ("a.txt.zst", zst)):
            for length in (5, 50, len(data) // 2, len(data) - 1):
                self.write(name, data[:length])
                self.assertIsNone(self.read(name), (name, length))
            self.write(name, b"no archive" + data)
            self.assertIsNone(self.read(name))

    def test_every_flipped_byte_of_a_gzip_text_is_noticed(self):
        text = "\n".join(stories(20))
        data = gzip.compress(text.encode())
        for at in range(len(data)):
            self.write("a.txt.gz", flipped(data, at, at % 8))
            self.assertIn(self.read("a.txt.gz"), (None, [text]), at)  # a few bits, as of the time, mean nothing for the text

    def test_json_arrays_that_end_early(self):
        for text in ("[", '[{"text": "x"}', '[{"text": "x"},', '[{"text": "x"', '[{"text": "x"} {"text": "y"}, 5]', "[[", "\ufeff[", "[]]"):
            self.write("a.json", text)
            self.assertIsNone(self.read("a.json"), text)

    def test_other_things_than_texts(self):
        self.write("empty.txt", b"")
        self.write("zeros.txt", bytes(100))
        self.write("program.txt", b"\x7fELF" + bytes(100))
        (self.directory / "directory.txt").mkdir()
        for name in ("empty.txt", "zeros.txt", "program.txt", "directory.txt", "missing.txt"):
            self.assertIsNone(self.read(name))


class Tokenizers(DirectoryTest):
    def test_directories_without_a_tokenizer(self):
        self.write("a.json", "{}")
        for name in (self.directory, self.directory / "a.json", self.directory / "b.json", self.directory / "none"):
            with self.assertRaises(vocabulary.TokenizerError):
                vocabulary.load(str(name))

    def test_vocabulary_and_merges_alone_are_of_gpt2(self):
        vocabulary.load(str(TOKENIZER)).model.save(str(self.directory))
        gpt2 = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"0": {"content": vocabulary.END_OF_TEXT}}}
        for config, added, words in (({}, {}, None), (gpt2, {vocabulary.END_OF_TEXT: 0}, None),
                                     ({"tokenizer_class": "Qwen2Tokenizer"}, {}, "is a Qwen2Tokenizer: transformers makes one"),
                                     (gpt2, {"[PAD]": 400}, r"has added tokens such as '\[PAD\]'"),
                                     ({"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, {}, "such as '<|im_end|>'")):
            self.write("tokenizer_config.json", json.dumps(config))
            self.write("added_tokens.json", json.dumps(added))
            if words is None:
                self.assertEqual(vocabulary.end_of(vocabulary.load(str(self.directory)), str(self.directory)), vocabulary.END_OF_TEXT)
            else:
                with self.assertRaisesRegex(vocabulary.TokenizerError, words.replace("|", r"\|")):
                    vocabulary.load(str(self.directory))

    def test_a_name_of_the_hub_without_a_network_fails_at_once(self):
        unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(self.directory), "no_proxy": "*"}
        with mock.patch.dict(os.environ, unreachable):
            with mock.patch("time.sleep") as sleep:
                with self.assertRaisesRegex(vocabulary.TokenizerError, "cannot be reached .*: download the tokenizer.json of 'gpt2'"):
                    vocabulary.load("gpt2")
            sleep.assert_not_called()


if __name__ == "__main__":
    unittest.main()
