"""The scripts that prepare data, with programs in place of train_gpt and make that only record how they were called; and the
exporter for TensorBoard without TensorBoard."""

import subprocess
import sys
from pathlib import Path

from test_documents import END, stories
from testing import ROOT, TOKENIZER, DirectoryTest

TRAIN_GPT = """#!/bin/sh
echo "$@" >> calls
mkdir -p out/run/checkpoints/commit-7/model
"""


class Scripts(DirectoryTest):
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
        return subprocess.run(command, cwd=self.directory, capture_output=True, text=True, env={"PATH": path, **variables})

    def calls(self) -> list[str]:
        path: Path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def test_stories_without_separators_are_validated_by_position(self):
        self.write("a.txt", "\n".join(stories(30)))
        done = self.run_script("scripts/tinystories", "a.txt", "out")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("validation reads the last 5 % of the text", done.stdout)
        train, = self.calls()
        self.assertIn("--data out/stories_train_*.bin", train)
        self.assertNotIn("--val-data", train)

    def test_stories_that_are_held_out_are_evaluated(self):
        self.write("a.txt", f"\n{END}\n".join(stories(600)))
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

    def test_openwebtext_takes_no_directory_of_tokens_and_texts(self):
        (self.directory / "data").mkdir()
        self.write("data/a.bin", "x")
        done = self.run_script("scripts/openwebtext", "data", "out", TOKENIZER=str(TOKENIZER), RANKS="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.write("data/b.txt", "x")
        done = self.run_script("scripts/openwebtext", "data", "out", TOKENIZER=str(TOKENIZER), RANKS="1")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("data has 1 file of tokens (.bin) and 1 of another kind", done.stderr)
        self.assertEqual(len(self.calls()), 1)
