"""Chats: tokens and masks of transformers, what is refused, and the constant texts that `train_gpt sample` speaks with."""

import contextlib
import io
import json
import re
import zlib

import pyarrow
import pyarrow.parquet

from chats import COUNT, TEMPLATES, chats, digest, write_tokenizer
from testing import ROOT, TOKENIZER, DirectoryTest
from tokenizers import Tokenizer
from tokenizer import chat, vocabulary

END = 0
REFERENCE = json.loads((ROOT / "test/reference/chats.json").read_text())["templates"]
LONG = 1024  # tokens that no chat has


def unmarked(template: str) -> str:
    return re.sub(r"{% (end)?generation %}\n?", "", template)


def without_padding(ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    end = len(ids)
    while ids[end - 1] == END and not mask[end - 1]:
        end -= 1
    return ids[:end], mask[:end]


class ChatTest(DirectoryTest):
    def setUp(self):
        super().setUp()
        (self.directory / "bpe").mkdir()

    def prepare_chats(self, prefix: str, template: str, path, *options) -> str:
        write_tokenizer(self.directory / "bpe", template)
        return self.prepare(prefix, "--tokenizer", self.directory / "bpe", "--template", "chat", "--val-fraction", 0, *options, path)

    def padded(self, prefix: str, length: int) -> list[tuple[list[int], list[int]]]:
        """Tokens and mask of each sequence, without the padding."""
        ids, mask = self.tokens(prefix, "train")
        return [without_padding(ids[begin:begin + length], mask[begin:begin + length]) for begin in range(0, len(ids) - 1, length)]

    def write_chats(self, name: str, made: list[list[dict]]):
        return self.write(name, "\n".join(json.dumps({"messages": messages}) for messages in made))


class Reference(ChatTest):
    def test_tokens_and_masks_are_those_of_transformers(self):
        path = self.write_chats("chats.jsonl", chats())
        for name, template in TEMPLATES.items():
            for kind, source in (("marked", template), ("unmarked", unmarked(template))):
                out = self.prepare_chats(f"{name}-{kind}", source, path, "--pad", LONG)
                self.assertIn(f"{COUNT} sequences of {LONG} tokens to train on", out)
                self.assertEqual("'<think>\\n\\n</think>\\n\\n' before the last one belongs to the prompt" in out, name == "qwen3")
                found, expected = self.padded(f"{name}-{kind}", LONG), REFERENCE[name]
                ids, mask = found[expected["chat"]]
                self.assertEqual((ids, "".join(map(str, mask))), (expected["ids"], expected["mask"]), (name, kind))
                self.assertEqual(sum(sum(mask) for _, mask in found), expected["learned"], (name, kind))
                self.assertEqual(digest(found), expected["sha256"], (name, kind))

    def test_formats_and_spellings_agree(self):
        made = chats(50)
        share = [[{"from": {"user": "human", "assistant": "gpt"}.get(one["role"], one["role"]), "value": one["content"]} for one in messages]
                 for messages in made]
        self.write_chats("a.jsonl", made)
        self.write("a.json", json.dumps([{"messages": messages, "id": 3} for messages in made]))
        self.write("b.json", json.dumps([{"conversations": messages} for messages in share]))
        pyarrow.parquet.write_table(pyarrow.table({"messages": made, "id": list(range(50))}), self.directory / "a.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"conversations": share}), self.directory / "b.parquet")
        names = ("a.jsonl", "a.json", "b.json", "a.parquet", "b.parquet")
        for name in names:
            self.prepare_chats(name, TEMPLATES["chatml"], self.directory / name)
        for name in names[1:]:
            self.assertEqual(self.files(name), self.files("a.jsonl"), name)

    def test_questions_with_answers_are_chats(self):
        said = [("a hat?", "the cat"), ("the mill\nold", "a mat "), ("", "x")]
        as_chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in said]
        self.prepare_chats("a", TEMPLATES["chatml"], self.write_chats("a.jsonl", as_chats))
        for name, records in (
            ("texts", [{"prompt": one, "completion": two} for one, two in said]),
            ("lists", [{"prompt": [one], "completion": [two]} for one, two in as_chats]),
            ("mixed", [{"prompt": one, "completion": [two]} for (one, _), (_, two) in zip(said, as_chats)]),
            ("orders", [{"instruction": one.split("\n")[0], "input": one.partition("\n")[2], "output": two} for one, two in said]),
        ):
            self.prepare_chats(name, TEMPLATES["chatml"], self.write(f"{name}.jsonl", "\n".join(map(json.dumps, records))))
            self.assertEqual(self.files(name), self.files("a"), name)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), self.directory / f"{name}.parquet")
            self.prepare_chats(f"{name}-table", TEMPLATES["chatml"], self.directory / f"{name}.parquet")
            self.assertEqual(self.files(f"{name}-table"), self.files("a"), name)

    def test_members_of_several_formats_stand_for_what_is_filled(self):
        said = [{"role": "user", "content": "a hat?"}, {"role": "assistant", "content": "the cat"}]
        self.prepare_chats("a", TEMPLATES["chatml"], self.write_chats("a.jsonl", [said] * 3))
        empty = dict.fromkeys(("messages", "conversations", "prompt", "completion", "instruction", "input", "output"))
        records = [empty | {"messages": said}, empty | {"messages": [], "prompt": "a hat?", "completion": "the cat"},
                   empty | {"instruction": "a hat?", "input": " ", "output": "the cat"}]
        out = self.prepare_chats("lines", TEMPLATES["chatml"], self.write("b.jsonl", "\n".join(map(json.dumps, records))))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), self.directory / "b.parquet")
        self.prepare_chats("table", TEMPLATES["chatml"], self.directory / "b.parquet")
        self.assertEqual((self.files("lines"), self.files("table")), (self.files("a"), self.files("a")))
        self.assertNotIn("ignored", out)

    def test_answers_in_a_prompt_are_only_read(self):
        turns = [{"role": role, "content": content} for role, content in
                 (("system", "be kind"), ("user", "a hat?"), ("assistant", "bad"), ("user", "a cat?"), ("assistant", "the cat"))]
        weighted = [turn | ({"weight": 0} if turn["content"] == "bad" else {}) for turn in turns]
        self.prepare_chats("a", TEMPLATES["chatml"], self.write_chats("a.jsonl", [weighted]))
        self.prepare_chats("b", TEMPLATES["chatml"], self.write("b.jsonl", json.dumps({"prompt": turns[:4], "completion": turns[4:]})))
        self.assertEqual(self.files("a"), self.files("b"))
        out = self.prepare_chats("c", TEMPLATES["chatml"], self.write("c.jsonl", json.dumps(
            {"instruction": "a hat?", "output": "the cat", "system": "be kind", "history": [["x", "y"]]})))
        self.prepare_chats("d", TEMPLATES["chatml"], self.write_chats("d.jsonl", [[turns[0], turns[1], turns[4]]]))
        self.assertEqual(self.files("c"), self.files("d"))
        self.assertIn("ignored members: history in 1 record\n", out)

    def test_an_end_of_text_follows_each_chat_and_is_not_doubled(self):
        path = self.write_chats("a.jsonl", chats(30))
        for source, ends in ((TEMPLATES["chatml"], 1), ((ROOT / "tokenizer/chat.jinja").read_text(), 0)):
            self.prepare_chats(f"pad{ends}", source, path, "--pad", LONG)
            self.prepare_chats(f"row{ends}", source, path)
            ids, mask = [], []
            for more, learned in self.padded(f"pad{ends}", LONG):
                if more[-1] != END:  # those of ours end with it, unless a chat ends with what the user says
                    more, learned = [*more, END], [*learned, 0]
                ids += more
                mask += learned
            self.assertEqual(self.tokens(f"row{ends}", "train"), (ids, mask))

    def test_what_is_longer_is_cut_and_counted(self):
        path = self.write_chats("a.jsonl", chats(200))
        self.prepare_chats("whole", TEMPLATES["chatml"], path, "--pad", LONG)
        whole = self.padded("whole", LONG)
        out = self.prepare_chats("cut", TEMPLATES["chatml"], path, "--pad", 64)
        kept = [without_padding(ids[:64], mask[:64]) for ids, mask in whole if any(mask[:64])]
        self.assertEqual(self.padded("cut", 64), kept)
        self.assertIn(f"longer than 64 tokens, which lost their end: {sum(len(ids) >= 64 for ids, _ in whole)}\n", out)
        self.assertIn(f"{200 - len(kept)} documents were left out, because nothing of them would have been predicted", out)

    def test_all_of_an_answer_counts_where_its_characters_are_composed(self):
        write_tokenizer(self.directory / "bpe", TEMPLATES["chatml"])
        composes = json.loads((self.directory / "bpe/tokenizer.json").read_text()) | {"normalizer": {"type": "NFC"}}
        self.write("bpe/tokenizer.json", json.dumps(composes))
        path = self.write_chats("a.jsonl", [[{"role": "user", "content": "e\u0301é"}, {"role": "assistant", "content": "e\u0301éE\u0301 "}]])
        self.prepare("a", "--tokenizer", self.directory / "bpe", "--template", "chat", "--val-fraction", 0, path)
        ids, mask = self.tokens("a", "train")
        answer = vocabulary.load(str(self.directory / "bpe")).encode("ééÉ <|im_end|>", add_special_tokens=False).ids
        self.assertEqual([token for token, learned in zip(ids, mask) if learned], answer)

    def test_an_assistant_may_begin(self):
        made = [{"role": "assistant", "content": "the mill"}, {"role": "user", "content": "a hat?"}, {"role": "assistant", "content": "yes"}]
        for name, template in (("marked", TEMPLATES["qwen3"]), ("unmarked", unmarked(TEMPLATES["qwen3"]))):
            self.prepare_chats(name, template, self.write_chats("a.jsonl", [made]))
            ids, mask = self.tokens(name, "train")
            tokenizer = vocabulary.load(str(self.directory / "bpe"))
            answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("the mill<|im_end|>", "yes<|im_end|>")]
            self.assertEqual([token for token, learned in zip(ids, mask) if learned], sum(answers, []))

    def test_chats_without_an_answer_are_left_out(self):
        path = self.write_chats("a.jsonl", [[{"role": "user", "content": "x"}], *chats(1)])
        self.assertIn("1 document was left out, because nothing of it", self.prepare_chats("one", TEMPLATES["llama"], path))


class Refused(ChatTest):
    def refuse(self, record: dict | str, template: str = TEMPLATES["chatml"]) -> str:
        write_tokenizer(self.directory / "bpe", template)
        path = self.write("a.jsonl", '{"messages": []}\n\n' + (record if isinstance(record, str) else json.dumps(record)))
        return self.refused("--tokenizer", self.directory / "bpe", "--template", "chat", path)

    def test_what_is_no_chat_is_named_with_file_and_line(self):
        for record, words in (
            ({"text": "x"}, "a.jsonl, line 3: the record has no field 'messages'"),
            ({"messages": "x"}, "a.jsonl, line 3: its messages are not a list of objects"),
            ({"messages": ["x"]}, "its messages are not a list of objects"),
            ({"messages": None}, "its messages are not a list of objects"),
            ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "message 2 has the role 'tool'"),
            ({"messages": [{"content": "x"}]}, "message 1 has the role None"),
            ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1 has the role ['user']"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the content of message 1 is NoneType, not text"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, "the content of message 1 is list, not text"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]}, "a list of one part of text"),
            ({"messages": [{"role": "user"}]}, "the content of message 1 is NoneType, not text"),
            ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}, "message 1 calls a tool"),
            ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "x"}}]}, "message 1 calls a tool"),
            ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, "message 1 has the weight 0.5"),
            ({"messages": [{"role": "assistant", "content": "x", "train": "no"}]}, "message 1 has the weight None, and 'train' 'no'"),
            ({"prompt": "x", "completion": 5}, "field 'completion' holds int, not text"),
            ({"prompt": ["x"], "completion": "y"}, "its messages are not a list of objects"),
            ({"completion": "y"}, "the record has no field 'prompt'; it has 'completion'"),
            ({"instruction": "x", "input": 3, "output": "y"}, "field 'input' holds int, not text"),
        ):
            self.assertIn(words, self.refuse(record))

    def test_an_answer_without_weight_is_read_and_not_predicted(self):
        turns = [("system", "be kind"), ("user", "a hat?"), ("assistant", "bad"), ("user", "a cat?"), ("assistant", "the cat")]
        plain = [{"role": role, "content": content} for role, content in turns]
        for name, template in TEMPLATES.items():
            for kind, source in (("marked", template), ("unmarked", unmarked(template))):
                self.prepare_chats(f"{name}-{kind}", source, self.write_chats("a.jsonl", [plain]))
                ids, mask = self.tokens(f"{name}-{kind}", "train")
                parts = [len(part) for part in re.findall("1+", "".join(map(str, mask)))]
                self.assertEqual(len(parts), 2)
                first = mask.index(1)
                for number, more in enumerate(({"weight": 0}, {"train": False}, {"weight": 0, "train": True}, {"train": 0})):
                    made = [plain[0], plain[1], plain[2] | more, plain[3], plain[4] | {"weight": 1, "train": True}]
                    self.prepare_chats(f"{name}-{kind}{number}", source, self.write_chats("b.jsonl", [made]))
                    expected = [*mask[:first], *[0] * parts[0], *mask[first + parts[0]:]]
                    self.assertEqual(self.tokens(f"{name}-{kind}{number}", "train"), (ids, expected))
        cut = TEMPLATES["chatml"].replace("{% generation %}", "{% generation %}{% endgeneration %}{% generation %}")
        write_tokenizer(self.directory / "bpe", cut)
        self.assertIn("marks 4 parts of 2 answers", self.refused("--tokenizer", self.directory / "bpe", "--template", "chat",
                                                                  self.directory / "b.jsonl"))

    def test_content_may_be_a_list_of_one_part_of_text(self):
        said = [{"role": "user", "content": "a hat?"}, {"role": "assistant", "content": "the cat"}]
        listed = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in said]
        for name, chats in (("plain", said), ("listed", listed)):
            self.prepare_chats(name, TEMPLATES["chatml"], self.write_chats("a.jsonl", [chats]))
        self.assertEqual(self.tokens("listed", "train"), self.tokens("plain", "train"))

    def test_a_system_text_beside_the_messages_is_one_of_them(self):
        said = [{"role": "user", "content": "a hat?"}, {"role": "assistant", "content": "the cat"}]
        system = {"role": "system", "content": "be kind"}
        records = {"a": {"messages": [system, *said]}, "b": {"messages": said, "system": "be kind"},
                   "c": {"conversations": said, "system": "be kind"}, "d": {"messages": [system, *said], "system": "other"}}
        outs = {}
        for name, record in records.items():
            outs[name] = self.prepare_chats(name, TEMPLATES["chatml"], self.write(f"{name}.jsonl", json.dumps(record)))
            self.assertEqual(self.files(name), self.files("a"))
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), self.directory / f"{name}.parquet")
            self.prepare_chats(f"{name}-table", TEMPLATES["chatml"], self.directory / f"{name}.parquet")
            self.assertEqual(self.files(f"{name}-table"), self.files("a"))
        self.assertNotIn("ignored", outs["a"] + outs["b"] + outs["c"])
        self.assertIn("ignored members: system in 1 record", outs["d"])

    def test_what_is_ignored_or_becomes_a_special_token_is_counted(self):
        chat = [{"role": "user", "content": "a<|endoftext|>b", "name": "Ann"}, {"role": "assistant", "content": "the cat", "name": ""}]
        path = self.write("a.jsonl", "\n".join(json.dumps({"messages": chat, "id": number, "tools": []}) for number in range(1, 4)))
        out = self.prepare_chats("a", TEMPLATES["chatml"], path)
        self.assertIn("ignored members: name in 3 messages, id in 3 records\n", out)
        self.assertIn("3 chats have what is spelled like a special token in what is said: it became one\n", out)
        record = {"instruction": "x", "input": "", "output": "y", "system": "be kind", "history": [["a", "b"]]}
        out = self.prepare("b", "--template", "alpaca", self.write("b.jsonl", json.dumps(record)))
        self.assertIn("ignored members: system in 1 record, history in 1 record\n", out)
        pyarrow.parquet.write_table(pyarrow.table({key: [value] for key, value in record.items()}), self.directory / "b.parquet")
        out = self.prepare("c", "--template", "alpaca", self.directory / "b.parquet")
        self.assertIn("ignored members: system in 1 record, history in 1 record\n", out)

    def test_of_two_lists_of_messages_one_is_named_as_ignored(self):
        said = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
        path = self.write("two.jsonl", json.dumps({"messages": [{"role": "user", "content": "z"}], "conversations": said}))
        self.assertIn("ignored members: messages in 1 record\n", self.prepare_chats("two", TEMPLATES["chatml"], path))

    def test_an_empty_spelling_stands_for_nothing(self):
        """Tables of several data sets have the columns and members of all of them."""
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        other = [{"role": None, "content": None, "from": "human", "value": "x"}, {"role": None, "content": None, "from": "gpt", "value": "y"}]
        plain, *outs = (self.write(f"{name}.jsonl", json.dumps(record)) for name, record in (
            ("a", {"messages": said}), ("b", {"messages": said, "conversations": []}), ("c", {"messages": [], "conversations": said}),
            ("d", {"messages": None, "conversations": other}), ("e", {"messages": said, "system": 5})))
        self.prepare_chats("a", TEMPLATES["chatml"], plain)
        for path in outs:
            out = self.prepare_chats(path.stem, TEMPLATES["chatml"], path)
            self.assertEqual(self.files(path.stem), self.files("a"))
            self.assertEqual("ignored members: system in 1 record" in out, path.stem == "e")

    def test_what_the_template_says_is_told(self):
        record = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
        for template, words in (
            ("{{ raise_exception('roles must alternate') }}", "a.jsonl, line 3: the chat template refuses it: roles must alternate"),
            ("{{ messages[7].content + 'x' }}", "the chat template refuses it"),
            ("{{ messages.append(3) }}", "the chat template refuses it"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses it"),
            ("{% for i in range(999999999) %}x{% endfor %}", "the chat template refuses it"),
            ("{{ messages", "the chat template is no Jinja: line 1"),
            ("{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}", "has one within another"),
            ("{% set x %}{% generation %}yes{% endgeneration %}{% endset %}{{ x[:2] }}", "cuts what {% generation %} holds"),
            ("{{ 1" + " + 1" * 9999 + " }}", "nested too deeply"),
            ("{% generation %}x", "the chat template is no Jinja"),
            (unmarked(TEMPLATES["chatml"]).replace("assistant\\n", "assistant\\n<think>"), "writes message 2 in another way than it asks"),
            ("{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}", "put {% generation %} and {% endgeneration %}"),
        ):
            self.assertIn(words, self.refuse(record, template))

    def test_a_tokenizer_without_a_template_says_what_to_give(self):
        path = self.write_chats("a.jsonl", chats(3))
        self.assertIn("has no chat template: give one with --chat-template", self.refused("--template", "chat", path))
        self.assertIn("no/such", self.refused("--template", "chat", "--chat-template", "no/such", path))
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            self.run_prepare("--out", self.directory / "x", "--chat-template", "x", path)

    def test_another_template_is_another_request(self):
        path = self.write_chats("a.jsonl", chats(3))
        for name, template, code in (("x", "chatml", 0), ("x", "llama", 2), ("y", "llama", 0), ("y", "llama", 2)):
            write_tokenizer(self.directory / "bpe", TEMPLATES[template])
            if (name, code) == ("y", 2):  # what the template calls bos_token
                config = self.directory / "bpe/tokenizer_config.json"
                config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "<|end|>"}))
            found, _, errors = self.run_prepare("--tokenizer", self.directory / "bpe", "--template", "chat", "--out", self.directory / name, path)
            self.assertEqual((found, "another chat template" in errors), (code, code == 2), errors)


class Pieces(ChatTest):
    def derive(self, template: str | None, *options) -> tuple[int, str, str]:
        if template is not None:
            write_tokenizer(self.directory / "bpe", template)
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = chat.main([str(self.directory / "bpe"), *map(str, options)])
        return code, out.getvalue(), errors.getvalue()

    def pieces(self) -> dict:
        return json.loads((self.directory / "bpe/chat.json").read_text())

    def test_pieces_of_the_references(self):
        for name, template in TEMPLATES.items():
            self.assertEqual(self.derive(template)[0::2], (0, ""), name)
            self.assertEqual(self.pieces(), REFERENCE[name]["pieces"])

    def test_pieces_of_three_templates(self):
        self.assertEqual(self.derive(TEMPLATES["chatml"])[0::2], (0, ""))
        ask = "<|im_end|>\n<|im_start|>assistant\n"
        self.assertEqual(self.pieces(), {
            "first": ["<|im_start|>user\n", ask], "system": ["<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", ask],
            "next": ["<|im_end|>\n<|im_start|>user\n", ask], "end": "<|im_end|>"})
        self.assertEqual(self.derive(TEMPLATES["llama"])[0::2], (0, ""))
        self.assertEqual(self.pieces()["first"][0], "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n")
        self.assertEqual(self.derive(TEMPLATES["zephyr"])[0::2], (0, ""))
        self.assertEqual(self.pieces()["next"][0], "<|endoftext|>\n<|user|>\n")

    def test_a_default_system_text_and_one_that_is_not_taken(self):
        default = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}\n" + TEMPLATES["chatml"]
        self.assertEqual(self.derive(default)[0::2], (0, ""))
        self.assertIn("Be kind.", self.pieces()["first"][0])
        self.assertNotIn("Be kind.", "".join(self.pieces()["system"]))
        refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}\n" + TEMPLATES["chatml"]
        self.assertEqual(self.derive(refuses)[0::2], (0, ""))
        self.assertIsNone(self.pieces()["system"])

    def test_a_blank_before_an_answer_is_the_models(self):
        """As Llama 2 and Mistral have it: the text that asks for an answer ends before the blank."""
        turns = ("{% for message in messages[begins:] %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + (SYSTEM if PLACE else '') "
                 "+ message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}")
        begins = "{% set begins = 1 if messages[0]['role'] == 'system' else 0 %}"
        for place, system in (("loop.first", ["<|begin_of_text|>[INST] <<", ">>", " [/INST]"]), ("loop.last", None)):
            template = begins + turns.replace("SYSTEM", "'<<' + messages[0]['content'] + '>>'").replace("PLACE", f"begins and {place}")
            code, out, errors = self.derive(template)
            self.assertEqual((code, errors), (0, ""), place)
            self.assertIn("puts a system text elsewhere in later turns" if system is None else "takes a system text", out)
            ask = ["<|begin_of_text|>[INST] ", " [/INST]"]
            self.assertEqual(self.pieces(), {"first": ask, "system": system, "next": ["<|endoftext|>" + ask[0], ask[1]], "end": "<|endoftext|>"})
        path = self.write_chats("a.jsonl", [[{"role": "user", "content": "a hat?"}, {"role": "assistant", "content": "the cat"}]])
        self.prepare_chats("a", template, path)
        ids, mask = self.tokens("a", "train")
        learned = vocabulary.load(str(self.directory / "bpe")).encode(" the cat <|endoftext|>", add_special_tokens=False).ids
        self.assertEqual([token for token, counts in zip(ids, mask) if counts], learned)

    def test_what_ends_an_answer_ends_a_text_elsewhere(self):
        for files, expected in (
            ({}, None),
            ({"config.json": {"eos_token_id": None}}, None),
            ({"config.json": {"eos_token_id": 7, "bos_token_id": 5}}, {"bos_token_id": 5, "eos_token_id": [7, "end"]}),
            ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [8, 9], "top_k": 3}},
             {"eos_token_id": [8, 9, "end"], "top_k": 3}),
            ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"top_k": 3}}, {"eos_token_id": [7, "end"], "top_k": 3}),
            ({"generation_config.json": {"eos_token_id": ["end"]}}, {"eos_token_id": ["end"]}),
            ({"generation_config.json": {"_from_model_config": True, "eos_token_id": 2}}, {"eos_token_id": [2, "end"]}),
            ({"config.json": {"eos_token_id": 7, "temperature": 0.5, "vocab_size": 9}}, {"temperature": 0.5, "eos_token_id": [7, "end"]}),
            ({"generation_config.json": {"eos_token_id": "2"}}, {"eos_token_id": "2"}),
        ):
            write_tokenizer(self.directory / "bpe", TEMPLATES["chatml"])
            end = vocabulary.load(str(self.directory / "bpe")).token_to_id("<|im_end|>")
            for name, held in files.items():
                self.write(f"bpe/{name}", json.dumps(held).replace('"end"', str(end)))
            code, out, errors = self.derive(None)
            self.assertEqual((code, errors), (0, ""))
            path = self.directory / "bpe/generation_config.json"
            found = json.loads(path.read_text()) if path.exists() else None
            self.assertEqual(found, expected and json.loads(json.dumps(expected).replace('"end"', str(end))))
            changes = expected is not None and files.get("generation_config.json") != expected
            self.assertEqual("generation_config.json: a text ends with <|im_end|>, too" in out, changes)
            self.assertEqual(self.derive(None)[1].count("generation_config"), 0)  # once
            for name in ("config.json", "generation_config.json"):
                (self.directory / "bpe" / name).unlink(missing_ok=True)
        for damaged in ("[3]", "{", "[" * 5000):
            self.write("bpe/generation_config.json", damaged)
            code, _, errors = self.derive(None)
            self.assertEqual((code, errors.count("\n")), (2, 1))
            self.assertIn("generation_config.json cannot be read: ", errors)

    def test_checksums_of_a_checkpoint_stay_true(self):
        self.write("bpe/checksums.json", '{"chat.json": 5, "tokenizer.json": 7}')
        self.assertEqual(self.derive(TEMPLATES["chatml"], "--chat-template", ROOT / "tokenizer/chat.jinja")[0::2], (0, ""))
        sums = json.loads((self.directory / "bpe/checksums.json").read_text())
        self.assertEqual(sums.pop("tokenizer.json"), 7)
        self.assertEqual(sums, {name: zlib.crc32((self.directory / "bpe" / name).read_bytes()) for name in ("chat.json", "chat_template.jinja")})

    def test_a_template_of_ones_own_goes_with_the_tokenizer(self):
        write_tokenizer(self.directory / "bpe", TEMPLATES["chatml"])
        code, out, errors = self.derive(None, "--chat-template", ROOT / "tokenizer/chat.jinja")
        self.assertEqual((code, errors), (0, ""))
        self.assertIn("an answer ends with <|endoftext|>; 24 conversations come out", out)
        self.assertNotIn("other tokens", out)
        self.assertEqual(self.pieces()["next"][0], "<|endoftext|>\n\n### User:\n")
        self.assertEqual(self.derive(None)[0], 0)  # now the template is in the directory
        self.assertEqual(self.pieces()["next"][0], "<|endoftext|>\n\n### User:\n")
        self.assertEqual(self.pieces()["first"][0], "<|begin_of_text|>### User:\n")
        config = self.directory / "bpe/tokenizer_config.json"
        names = json.loads(config.read_text())
        for begin in ("<|endoftext|>", None):  # as GPT-2 has it, and as Qwen
            config.write_text(json.dumps(names | {"bos_token": begin}))
            self.assertEqual(self.derive(None)[0], 0)
            self.assertEqual(self.pieces()["first"][0], "### User:\n")

    def test_templates_that_cannot_be_taken_apart(self):
        for template, words in (
            ("{% for message in messages %}{{ message.content | upper }}{% endfor %}", "changes what is said"),
            ("{% for message in messages %}{{ message.content }}\n{% endfor %}", "no special token"),
            (TEMPLATES["chatml"].replace("'\\n' }}\n{%- endfor", "'\\n' * loop.index }}\n{%- endfor"), "ends a chat in another way than an answer"),
            ("{{ messages | length }}" + TEMPLATES["chatml"], "another way than it asks"),
        ):
            code, _, errors = self.derive(template)
            self.assertEqual((code, errors.count("\n")), (2, 1), template)
            self.assertIn(words, errors)
            self.assertIn(f"{self.directory / 'bpe'}: the chat template", errors)
            self.assertIn("give a simpler one with --chat-template (tokenizer.prepare takes this one, too)", errors)
            self.assertFalse((self.directory / "bpe/chat.json").exists())

    def test_an_answer_after_a_blank_is_told(self):
        blank = TEMPLATES["chatml"].replace("message['role'] + '\\n'", "message['role'] + ' '").replace("assistant\\n", "assistant ")
        code, out, _ = self.derive(blank)
        self.assertEqual(code, 0)
        self.assertIn("has other tokens after what asks for it", out)

    def test_tokens_that_only_other_files_have_are_named(self):
        for name, content in (("added_tokens.json", {"<|im_end|>": 500, "[PAD]": 501}),
                              ("tokenizer_config.json", {"added_tokens_decoder": {"500": {"content": "<|im_end|>"}}, "eos_token": "<|im_end|>"})):
            write_tokenizer(self.directory / "bpe", TEMPLATES["chatml"])
            plain = json.loads((TOKENIZER / "tokenizer.json").read_text())
            self.write(f"bpe/{name}", json.dumps(content))
            self.write("bpe/chat_template.jinja", TEMPLATES["chatml"])
            self.assertEqual(self.derive(None)[0], 0, name)  # all of them are in tokenizer.json, but one that the template does not write
            self.write("bpe/tokenizer.json", json.dumps(plain))
            code, _, errors = self.derive(None)
            self.assertEqual((code, "writes '<|im_end|>', which a file beside tokenizer.json calls a token" in errors), (2, True), errors)
            (self.directory / "bpe" / name).unlink()

    def test_the_blank_in_front_of_a_text_is_of_no_answer(self):
        kind = json.loads((TOKENIZER / "tokenizer_kinds.json").read_text())["prepend"]
        whole = json.loads((TOKENIZER / "tokenizer.json").read_text()) | kind["file"] | {"model": kind["model"]}
        write_tokenizer(self.directory / "bpe", TEMPLATES["chatml"])
        special = json.loads((self.directory / "bpe/tokenizer.json").read_text())["added_tokens"]
        whole["added_tokens"] = [token for token in special if token["special"]]
        self.write("bpe/tokenizer.json", json.dumps(whole))
        code, out, _ = self.derive(None)
        self.assertEqual((code, "24 conversations" in out, "has other tokens" in out), (0, True, False))

    def test_names_of_tokens_and_named_templates(self):
        tokenizer = vocabulary.load(str(TOKENIZER))
        directory = self.directory / "bpe"
        for config, expected in (
            ({"chat_template": "{{ bos_token }}{{ eos_token }}"}, "<|endoftext|><|endoftext|>"),  # as GPT-2's class has it
            ({"chat_template": "{{ bos_token }}{{ eos_token }}", "tokenizer_class": "X", "eos_token": {"content": "<e>"}}, "<e>"),
            ({"chat_template": "{{ eos_token }}", "tokenizer_class": None}, "<|endoftext|>"),
            ({"chat_template": "{{ '\\ud800' }}"}, "?"),
            ({"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]}, "y"),
        ):
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            self.assertEqual(chat.load(str(directory), tokenizer, None).render([])[0], expected)
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}x"}))
        other = Tokenizer.from_str(tokenizer.to_str().replace(vocabulary.END_OF_TEXT, "</s>"))  # is not GPT-2's
        self.assertEqual(chat.load(str(directory), other, None).render([])[0], "x")
        for text in ("{", "[]", '{"chat_template": [3]}', '{"chat_template": [{"name": "tools", "template": "x"}]}'):
            (directory / "tokenizer_config.json").write_text(text)
            with self.assertRaises(chat.ChatError):
                chat.load(str(directory), tokenizer, None)
