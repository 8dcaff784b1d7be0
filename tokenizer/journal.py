"""The record of finished parts, from which an interrupted run goes on.

PREFIX.journal has one JSON object a line: first the request, then one line for each part,
written when the part's shards are on disk under their final names. A line without its
line end was interrupted and is ignored. Parts end where chunks end, so a part that is
made again is the same as before.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizer.shard import ShardError, read_header
from tokenizer.sources import Position


class JournalError(Exception):
    """A journal that is damaged or belongs to another request."""


@dataclass
class Part:
    """One shard for each side, and what went into them; see encode.Encoded for the counts."""

    shards: dict[str, dict]  # by side: file, tokens, checksum; none for a side without tokens
    documents: int
    replaced: int
    cut: int
    left_out: int
    next: Position  # where the next part begins to read
    done: bool  # this is the last part
    empty: int = 0


class Journal:
    """PREFIX.journal. Parts whose shards are gone or changed, and all after them, are forgotten."""

    def __init__(self, prefix: Path, request: dict):
        self.path = prefix.with_name(prefix.name + ".journal")
        self.request = request
        self.parts: list[Part] = []
        if self.path.exists():
            self._load()
        self._rewrite()

    def _load(self) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1]
        if len(lines) < 2:  # no part is finished, so nothing is lost whatever the request was
            return
        try:
            request, *entries = [json.loads(line) for line in lines]
            parts = [Part(**{**entry, "next": Position(**entry["next"])}) for entry in entries]
            self._check_request(request)
            for part in parts:
                if not self._is_whole(part):
                    break
                self.parts.append(part)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise JournalError(f"{self.path} is damaged ({error}): remove it to begin again") from None

    def _check_request(self, request: dict) -> None:
        for key, value in self.request.items():
            if request.get(key) != value:
                raise JournalError(
                    f"{self.path} belongs to a run with another {key} ({request.get(key)}, now {value}): "
                    "repeat that run's command, remove the journal to begin again, or choose another --out"
                )

    def _is_whole(self, part: Part) -> bool:
        try:
            for shard in part.shards.values():
                header = read_header(self.path.with_name(shard["file"]))
                if (header.count, header.checksum) != (shard["tokens"], shard["checksum"]):
                    return False
        except (ShardError, OSError):
            return False
        return True

    def _rewrite(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        with open(temporary, "w") as file:
            file.write(json.dumps(self.request) + "\n")
            file.writelines(json.dumps(asdict(part)) + "\n" for part in self.parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(part)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def next(self) -> Position:
        return self.parts[-1].next if self.parts else Position()

    @property
    def done(self) -> bool:
        return bool(self.parts) and self.parts[-1].done

    def tokens(self, side: str) -> int:
        return sum(part.shards[side]["tokens"] for part in self.parts if side in part.shards)

    def sequences(self, side: str, length: int) -> int:
        return sum(part.shards[side]["tokens"] // length for part in self.parts if side in part.shards)
