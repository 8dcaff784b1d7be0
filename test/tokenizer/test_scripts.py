"""The scripts that prepare data, with programs in place of train_gpt and make that only record how they were called; fine-tuning with
train_gpt; and the exporter for TensorBoard without TensorBoard."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from chats import TEMPLATES, write_tokenizer
from test_documents import END, stories
from testing import ROOT, TOKENIZER, DirectoryTest

TRAIN_GPT = """#!/bin/sh
echo "$@" >> calls
mkdir -p out/run/checkpoints/commit-7/model
"""


class Stage(DirectoryTest):
    def setUp(self):
        super().setUp()
        for name in ("scripts", "tokenizer"):
            (self.directory / name).symlink_to(ROOT / name)
        (self.directory / "build/venv/bin").mkdir(parents=True)
        (self.directory / "bin").mkdir()
        self.write("build/config.mk", "HAVE_MPI := no\n")
        for name, text in (("train_gpt", TRAIN_GPT), ("bin/make", "#!/bin/sh\n"),
                           ("build/venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
            self.write(name, text).chmod(0o755)

    def run_script(self, *command, **variables) -> subprocess.CompletedProcess:
        path = f"{self.directory}/bin:/usr/local/bin:/usr/bin:/bin"
        return subprocess.run(command, cwd=self.directory, capture_output=True, text=True, env={"PATH": path, "HOME": str(self.directory), **variables})

    def calls(self) -> list[str]:
        path: Path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


class Scripts(Stage):
    def test_stories_without_separators_are_validated_by_position(self):
        self.write("a.txt", "\n".join(stories(30)))
        done = self.run_script("scripts/tinystories", "a.txt", "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("validation reads the last 5 % of the text", done.stdout)
        train, = self.calls()
        self.assertIn("--data out/stories_train_*.bin", train)
        self.assertNotIn("--val-data", train)

    def test_held_out_stories_of_less_than_a_window_are_not_evaluated(self):
        self.write("a.txt", f"\n{END}\n".join(stories(600)))
        done = self.run_script("scripts/tinystories", "a.txt", "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(list((self.directory / "out").glob("stories_val_*.bin")))
        self.assertIn("validation reads the last 5 % of the text", done.stdout)
        train, = self.calls()
        self.assertNotIn("--val-data", train)

    def test_stories_that_are_held_out_are_evaluated(self):
        self.write("a.txt", f"\n{END}\n".join(stories(3000)))
        done = self.run_script("scripts/tinystories", "a.txt", "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        train, evaluation = self.calls()
        self.assertIn("--val-data out/stories_val_*.bin", train)
        self.assertRegex(evaluation, "^eval --from out/run/checkpoints/commit-7/model .*stories_val")

    def test_an_export_without_tensorboard_says_what_to_install(self):
        bare = (sys.executable, "-I", "-S")  # finds no package
        done = self.run_script(*bare, str(ROOT / "dev/tensorboard/export.py"), "run", "--out", "events")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertRegex(done.stderr, "-m pip install -r .*dev/tensorboard/requirements.txt")

    def test_without_arguments_the_head_is_shown(self):
        for name in ("finetune", "alpaca", "download"):
            done = self.run_script(f"scripts/{name}")
            self.assertEqual(done.returncode, 2)
            self.assertTrue(done.stderr.startswith(f"{name}: "), done.stderr)

    def test_another_directory_is_named(self):
        for name in ("finetune", "tinystories", "openwebtext", "alpaca", "first-run"):
            done = subprocess.run((str(ROOT / "scripts" / name), "a", "b"), cwd=self.directory / "bin", capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn("in the root of the project", done.stderr)

    def test_a_launcher_of_the_user_starts_one_rank_too(self):
        self.write("build/config.mk", "HAVE_MPI := yes\nMPIRUN := false\n")
        for launcher, said in (("echo --host pc2", "--host pc2 -np 1 echo x\n"), ("", "x\n")):
            done = self.run_script("sh", "-c", ". scripts/common; on_ranks 1 echo x", MPIRUN=launcher)
            self.assertEqual(done.stdout, said)

    def test_openwebtext_takes_paths_with_blanks(self):
        (self.directory / "d a").mkdir()
        self.write("d a/a b.txt", f"\n{END}\n".join(stories(60)))
        (self.directory / "o t/run/checkpoints/commit-7/model").mkdir(parents=True)
        for data in ("d a", "d a/a b.txt", "d a/a*.txt"):
            done = self.run_script("scripts/openwebtext", data, "o t", TOKENIZER=str(TOKENIZER), RANKS="1", VAL_FRACTION="0.2")
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.calls()), 3)
        self.assertIn("--data o t/web_train_*.bin --val-data o t/web_val_*.bin", self.calls()[0])

    def test_openwebtext_takes_no_directory_of_tokens_and_texts(self):
        (self.directory / "my data").mkdir()
        self.write("my data/a.bin", "x")
        done = self.run_script("scripts/openwebtext", "my data", "out", TOKENIZER=str(TOKENIZER), RANKS="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.write("my data/b.txt", "x")
        done = self.run_script("scripts/openwebtext", "my data", "out", TOKENIZER=str(TOKENIZER), RANKS="1")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("my data has 1 file of tokens (.bin) and 1 of another kind", done.stderr)
        self.assertEqual(len(self.calls()), 1)


class Finetune(Stage):
    """scripts/finetune and scripts/alpaca with a small Llama, on as many ranks as a user's call has."""

    def setUp(self):
        super().setUp()
        self.write("train_gpt", f'#!/bin/sh\nexec {ROOT}/train_gpt "$@"\n')
        shutil.copy(ROOT / "build/config.mk", self.directory / "build/config.mk")
        (self.directory / "bpe").mkdir()
        write_tokenizer(self.directory / "bpe", TEMPLATES["llama3"])
        self.write("model.json", json.dumps({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": True, "hidden_act": "silu"}))
        self.write("text.txt", "\n\n".join(stories(40)))
        made = self.run_script("./train_gpt", "--model", "model.json", "--tokenizer", "bpe", "--data", "text.txt", "--seq-len", "64",
                               "--tokens", "2k", "--val-batches", "none", "--sample-tokens", "none", "--threads", "1", "--out", "base")
        self.assertEqual(made.returncode, 0, made.stderr)
        model, = (self.directory / "base/checkpoints").glob("commit-*/model")
        model.rename(self.directory / "m")
        (self.directory / "m/checksums.json").unlink()
        self.write("chats.jsonl", "".join(json.dumps({"messages": [
            {"role": "system", "content": r"It's \nice."}, {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": "the mill"}, {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "a fox"}]}) + "\n" for number in range(60)))

    def finetune(self, *arguments, script="scripts/finetune", **variables) -> subprocess.CompletedProcess:
        return self.run_script(script, *arguments, **{"LENGTH": "144", "EPOCHS": "1", "LR": "0.03", "HELD_OUT": "0.1", "OPTIONS": "--threads 1"} | variables)

    def losses(self, done: subprocess.CompletedProcess) -> list[float]:
        """Of the answers that are held out, before and after."""
        return [float(found) for found in re.findall(r"nats per token ([0-9.]+)", done.stdout)]

    def test_a_model_learns_chats_and_stays_as_it_was(self):
        before = {path.name: path.read_bytes() for path in (self.directory / "m").iterdir()}
        done = self.finetune("m", "chats.jsonl", "out", EPOCHS="10")
        self.assertEqual(done.returncode, 0, done.stderr)
        before_it, after_it = self.losses(done)
        self.assertLess(after_it, before_it - 0.3)  # adapters alone cannot do much with a model that knows nothing
        self.assertIn("> What is 0?", done.stdout)
        self.assertIn(r"./train_gpt sample --from out/model --system 'It'\''s \nice.' --interactive on", done.stdout)
        self.assertEqual({path.name: path.read_bytes() for path in (self.directory / "m").iterdir()}, before)
        self.assertEqual((self.directory / "out/model/chat.json").read_bytes(), (self.directory / "out/tokenizer/chat.json").read_bytes())
        again = self.finetune("m", "chats.jsonl", "out", EPOCHS="10", QUESTION="Who?")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("were made before", again.stdout)
        self.assertIn("> Who?", again.stdout)

    def test_a_model_without_a_template_gets_ours(self):
        self.write("m/tokenizer_config.json", "{}")
        (self.directory / "m/chat_template.jinja").unlink(missing_ok=True)
        done = self.finetune("m", "chats.jsonl", "out", LORA="off", EPOCHS="10")
        self.assertEqual(done.returncode, 0, done.stderr)
        before, after = self.losses(done)
        self.assertLess(after, 0.5 * before)
        self.assertIn("m has no chat template: its chats are written by tokenizer/chat.jinja\n", done.stdout)
        self.assertRegex(done.stdout, "sample --from out/run/checkpoints/commit-[0-9]*/model")
        self.write("m/chat_template.jinja", TEMPLATES["llama3"])  # what it has got since is not passed over
        self.assertIn("token files of another chat template", self.finetune("m", "chats.jsonl", "out", LORA="off", EPOCHS="10").stderr)

    def test_alpaca_is_fine_tuning_with_its_records(self):
        self.write("records.jsonl", "".join(json.dumps({"instruction": f"Say {number}.", "input": "", "output": "the fox"}) + "\n" for number in range(60)))
        done = self.finetune("m", "records.jsonl", "out", script="scripts/alpaca", QUESTION="Tell me.")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("### Instruction:\nTell me.\n\n### Response:\n", done.stdout)
        self.assertNotIn("adapters", done.stdout)

    def test_a_completion_is_asked_for_by_its_prompt(self):
        self.write("pairs.jsonl", "".join(json.dumps({"prompt": f"{number} is", "completion": " a fox"}) + "\n" for number in range(60)))
        for question, asked in (("", "0 is"), ("--two", "--two"), ("so " * 300, "")):  # the last one is too long, which ends nothing
            done = self.finetune("m", "pairs.jsonl", "out", TEMPLATE="completion", QUESTION=question)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, f"(?m)^sample .*\n{asked}") if asked else self.assertIn("the prompt has", done.stderr)

    def test_what_is_missing_is_named_first(self):
        self.write("few.jsonl", json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
        (self.directory / "bare").mkdir()
        self.write("bare/config.json", "{}")
        for arguments, words in ((("no", "chats.jsonl"), "no has no config.json"), (("bare", "chats.jsonl"), "bare has no tokenizer"),
                                 (("m", "no.jsonl"), "there is no file no.jsonl"), (("m", "few.jsonl", "few"), "few.jsonl is too small"),
                                 (("m", "text.txt", "text"), "text.txt is a text, but --template chat is for records")):
            done = self.finetune(*arguments)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
