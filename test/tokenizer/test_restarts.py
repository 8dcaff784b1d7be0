"""prepare, killed at every stage and started again, makes the files of a run that nothing disturbed."""

import os
import signal
import subprocess
from unittest import mock

from tokenizer import prepare
from test_documents import END, stories
from testing import DirectoryTest

OPTIONS = ("--val-fraction", 0.3)


class Restarts(DirectoryTest):
    def setUp(self):
        super().setUp()
        self.text = self.write("a.txt", f"\n{END}\n".join(stories(12)))
        self.prepare("whole", *OPTIONS, self.text)
        self.whole = self.files("whole")
        self.assertEqual(len(self.whole), 2)

    def killed_at(self, prefix: str, stage: int) -> bool:
        """Runs prepare in a process that kills itself at its stage number `stage`; False where it has fewer."""
        child = os.fork()
        if child == 0:
            left = stage

            def doomed(function):
                def call(*arguments):
                    nonlocal left
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                    return function(*arguments)
                return call

            try:
                os.fsync, os.replace = doomed(os.fsync), doomed(os.replace)
                prepare.is_held_out = doomed(prepare.is_held_out)  # once a document
                self.run_prepare("--out", self.directory / prefix, *OPTIONS, self.text)
            finally:
                os._exit(0)
        return os.waitpid(child, 0)[1] == signal.SIGKILL

    def finish(self, prefix: str):
        """Starts the run again, and compares."""
        self.prepare(prefix, *OPTIONS, self.text)
        self.assertEqual(self.files(prefix), self.whole, prefix)

    def test_killed_at_every_stage(self):
        stage = 0
        while self.killed_at(f"k{stage}", stage):
            if stage < 12:  # documents are still read: what train_gpt makes of half of them has no name yet
                self.assertEqual(self.files(f"k{stage}"), {})
            self.finish(f"k{stage}")
            stage += 1
        self.assertEqual(stage, 12 + 1 + 3)  # the record is synced; it and two files get their names

    def test_files_that_are_gone_or_cut_are_made_again(self):
        for name in self.whole:
            path = self.directory / ("whole" + name)
            for damage in (path.unlink, lambda: path.write_bytes(b""), lambda: os.truncate(path, 300)):
                damage()
                self.finish("whole")

    def test_a_finished_run_is_not_repeated(self):
        with mock.patch.object(subprocess, "Popen", side_effect=AssertionError):
            out = self.prepare("whole", *OPTIONS, self.text)
        self.assertIn("12 documents", out)
        self.assertIn("were made before", out)

    def test_another_request_is_refused(self):
        self.assertEqual(self.run_prepare("--out", self.directory / "whole", "--pad", 64, *OPTIONS, self.text)[0], 2)
        os.utime(self.text, (1, 1))
        code, _, errors = self.run_prepare("--out", self.directory / "whole", *OPTIONS, self.text)
        self.assertEqual(code, 2)
        self.assertIn("another inputs", errors)
        self.assertEqual(self.files("whole"), self.whole)

    def test_files_without_a_record_are_not_replaced(self):
        record = self.directory / "whole.prepared.json"
        for content in ("{", "[]", '{"files": {}}', "", None):
            record.unlink()
            if content is not None:
                record.write_text(content)
            code, _, errors = self.run_prepare("--out", self.directory / "whole", *OPTIONS, self.text)
            self.assertEqual(code, 2)
            self.assertIn("is there already", errors)
            self.assertEqual(self.files("whole"), self.whole)

    def test_a_prefix_is_no_pattern(self):
        for prefix in ("a[1]", "b*", "c?"):
            self.prepare(prefix, *OPTIONS, self.text)
            self.assertIn("were made before", self.prepare(prefix, *OPTIONS, self.text))
            self.assertEqual(self.run_prepare("--out", self.directory / prefix, "--pad", 64, *OPTIONS, self.text)[0], 2)

    def test_only_what_the_same_prefix_has_left_is_removed(self):
        others = [self.directory / f"whole{middle}.abcd1234.unfinished" for middle in ("", ".v2", "r")]
        for path in others:
            path.mkdir()
        self.prepare("whole.v2", *OPTIONS, self.text)
        self.assertEqual([path.exists() for path in others], [True, False, True])
        others[1].mkdir()
        (self.directory / "whole_train_00000.bin").unlink()
        self.finish("whole")
        self.assertEqual([path.exists() for path in others], [False, True, True])
