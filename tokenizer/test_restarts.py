"""prepare, killed at every stage and started again, makes the files of a run that nothing disturbed."""

import json
import os
import signal
from unittest import mock

from tokenizer.journal import Journal, JournalError
from tokenizer.shard import ShardWriter
from tokenizer.test_documents import END, stories
from tokenizer.testing import DirectoryTest, small_chunks

PART = ("--shard-tokens", 2000, "--val-fraction", 0.3)


class Restarts(DirectoryTest):
    def setUp(self):
        super().setUp()
        self.text = self.write("a.txt", f"\n{END}\n".join(stories(120)))
        small = small_chunks(3000)
        small.start()
        self.addCleanup(small.stop)
        self.prepare("whole", *PART, self.text)
        self.whole = self.files("whole")
        self.assertGreater(len(self.whole), 6)

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
                ShardWriter._write = doomed(ShardWriter._write)
                self.run_prepare("--out", self.directory / prefix, *PART, self.text)
            finally:
                os._exit(0)
        return os.waitpid(child, 0)[1] == signal.SIGKILL

    def finish(self, prefix: str):
        """Starts the run again, and compares."""
        self.prepare(prefix, *PART, self.text)
        self.assertEqual(self.files(prefix), self.whole, prefix)

    def test_killed_at_every_stage(self):
        stage = 0
        while self.killed_at(f"k{stage}", stage):
            self.finish(f"k{stage}")
            stage += 1
        self.assertGreater(stage, 20)

    def test_killed_again_and_again(self):
        starts = 0
        while self.killed_at("again", 9 + starts):
            starts += 1
        self.finish("again")
        self.assertGreater(starts, 2)

    def test_a_journal_that_ends_anywhere(self):
        journal = self.directory / "whole.journal"
        text = journal.read_bytes()
        for length in sorted({*range(0, len(text), 97), *(at + more for at, byte in enumerate(text) if byte == 10 for more in (0, 1, 2))}):
            journal.write_bytes(text[:length])
            self.finish("whole")
            self.assertEqual(journal.read_bytes(), text)

    def test_shards_that_are_gone_or_cut_are_made_again(self):
        for name in self.whole:
            path = self.directory / ("whole" + name)
            for damage in (path.unlink, lambda: path.write_bytes(b""), lambda: os.truncate(path, 300)):
                damage()
                self.finish("whole")

    def test_a_finished_run_is_not_repeated(self):
        with mock.patch.object(ShardWriter, "_write", side_effect=AssertionError):
            self.finish("whole")

    def test_another_request_is_refused(self):
        self.assertEqual(self.run_prepare("--out", self.directory / "whole", "--pad", 64, *PART, self.text)[0], 2)
        os.utime(self.text, (1, 1))
        code, _, errors = self.run_prepare("--out", self.directory / "whole", *PART, self.text)
        self.assertEqual(code, 2)
        self.assertIn("another inputs", errors)

    def test_a_damaged_journal_is_named(self):
        path = self.directory / "whole.journal"
        request, part = path.read_text().split("\n")[:2]
        entry = json.loads(part)
        for lines in ([request, "{"], ["[]", part], ["7", part], [request, "[]"], [request, "null"], [request, part, "\0\0"],
                      [request, json.dumps({**entry, "next": 3})], [request, json.dumps({**entry, "shards": 3})],
                      [request, json.dumps({**entry, "shards": {"train": {}}})], [request, json.dumps({**entry, "more": 1})]):
            path.write_text("\n".join([*lines, ""]))
            with self.assertRaisesRegex(JournalError, "is damaged .*: remove it to begin again"):
                Journal(self.directory / "whole", json.loads(request))
