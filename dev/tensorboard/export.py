#!/usr/bin/env python3
"""Writes the logs of runs as TensorBoard event files.

    python dev/tensorboard/export.py runs/tiny-acco-1 runs/tiny-zero1-1 --out events
    tensorboard --logdir events

The horizontal axis counts tokens, by which rules with other batches compare; times are those of training, without pauses,
from when the run was started. Run it again while a run goes on: the same log gives the same bytes, so the file only
grows, and a TensorBoard that looks at it follows.
"""

import argparse
import io
import json
import pathlib
import sys
from collections.abc import Iterator

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as error:
    print(f"export.py: {error}, and event files are written with tensorboard: {sys.executable} -m pip install -r "
          f"{pathlib.Path(__file__).with_name('requirements.txt')}", file=sys.stderr)
    sys.exit(2)

FILE = "events.out.tfevents.0.acco"
TAGS = {
    "report": {
        "loss": "loss/train", "perfect_loss": "loss/train_best_possible", "lr": "learning_rate",
        "grad_norm": "gradient_norm", "tokens_per_second": "tokens_per_second", "compute_ms": "per_commit/compute_ms",
        "communication_ms": "per_commit/communication_ms", "exposed_ms": "per_commit/exposed_ms",
    },
    "validation": {"loss": "loss/validation", "perfect_loss": "loss/validation_best_possible"},
}


def entries(log: pathlib.Path) -> Iterator[dict]:
    """The events of a log but for a line that is not whole: it is being written, or the machine died."""
    for line in log.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def restart(tokens_at: dict[int, int], commit: int) -> Event:
    """Makes TensorBoard drop what a run had reported beyond the checkpoint that it was resumed from."""
    reached = max((tokens for at, tokens in tokens_at.items() if at <= commit), default=-1)
    return Event(step=reached + 1, session_log=SessionLog(status=SessionLog.START))


def events(log: pathlib.Path) -> Iterator[Event]:
    yield Event(file_version="brain.Event:2")
    tokens_at: dict[int, int] = {}
    began = latest = 0.0
    for entry in entries(log):
        if entry["event"] == "start":
            began = entry["time"] - latest
        if entry["event"] in ("resume", "rollback"):
            yield restart(tokens_at, entry["commit"])
        tags = TAGS.get(entry["event"], {})
        known = {tag: entry[key] for key, tag in tags.items() if entry[key] is not None}
        if known:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
            tokens_at[entry["commit"]], latest = entry["tokens"], entry["seconds"]
            yield Event(wall_time=began + latest, step=entry["tokens"], summary=Summary(value=values))


def export(log: pathlib.Path, directory: pathlib.Path) -> None:
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events(log):
        writer.write(event.SerializeToString(deterministic=True))
    written = buffer.getvalue()
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    before = file.read_bytes() if file.exists() else b""
    if written.startswith(before):
        with file.open("ab") as end:
            end.write(written[len(before):])
    else:  # another run was here
        file.write_bytes(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="DIR", help="gets a directory for each run")
    arguments = parser.parse_args()
    names: set[str] = set()
    for run in arguments.runs:
        if not (run / "log.jsonl").is_file():
            parser.error(f"{run} is no run: give a directory that train_gpt wrote (it holds log.jsonl)")
        if run.resolve().name in names:
            parser.error(f"two runs are called {run.resolve().name}: export each with an --out of its own")
        names.add(run.resolve().name)
    for run in arguments.runs:
        export(run / "log.jsonl", arguments.out / run.resolve().name)


if __name__ == "__main__":
    main()
