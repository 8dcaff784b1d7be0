"""Turns a record into a document: a prompt, which the model only reads, and a text, which it learns to predict. Chats are in chat.py."""

import shlex
from collections.abc import Callable

ALPACA_FIELDS = ("instruction", "input", "output")
COMPLETION_FIELDS = ("prompt", "completion")
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def text_of(record: dict, field: str) -> str:
    if not isinstance(record[field], str):
        raise TypeError(f"field '{field}' holds {type(record[field]).__name__}, not text")
    return record[field]


def plain(record: dict, field: str) -> tuple[str, str]:
    """One field, all of it predicted."""
    return "", text_of(record, field)


def alpaca(record: dict, _field: str) -> tuple[str, str]:
    """A prompt with instruction and input, and the output.

    The prompt ends with a line end and is encoded by itself, so the same prompt has the same tokens when sampling.
    """
    said = {field: text_of(record, field) for field in ("instruction", "input") if field != "input" or record.get(field)}
    template = ALPACA_WITH_INPUT if "input" in said else ALPACA_WITHOUT_INPUT
    return template.format(**said), text_of(record, "output")


def completion(record: dict, _field: str) -> tuple[str, str]:
    """A prompt and what follows it, without a text of our own around them. Each is encoded by itself."""
    return text_of(record, "prompt"), text_of(record, "completion")


TEMPLATES: dict[str, Callable[[dict, str], tuple[str, str]]] = {"plain": plain, "alpaca": alpaca, "completion": completion}


# What a record must have for a template: one of these sets of members, each of a kind.
ALPACA, TEXTS = {"instruction": ("text",), "output": ("text",)}, {"prompt": ("text",), "completion": ("text",)}
NEEDED = {"alpaca": (ALPACA,), "completion": (TEXTS,),
          "chat": ({"messages": ("list",)}, {"conversations": ("list",)}, dict.fromkeys(TEXTS, ("text", "list")), ALPACA)}


def fitting(record: dict, template: str) -> str:
    """Which other options read a record that this template does not; nothing if none does."""
    kinds = {key: "list" if isinstance(value, list) else "text" if isinstance(value, str) else "" for key, value in record.items()}
    options = [f"--template {other}" for other, sets in NEEDED.items() if other != template
               and any(all(kinds.get(key) in allowed for key, allowed in needed.items()) for needed in sets)]
    texts = [key for key, kind in kinds.items() if kind == "text" and key.isprintable() and key]
    options = options or ([f"--field {shlex.quote(texts[0])}"] if texts and template == "plain" else [])
    return f": {' or '.join(options)} {'reads' if len(options) == 1 else 'read'} it" if options else ""


def lacking(record: dict, template: str) -> str:
    """What a record, or a table, has instead of a field."""
    names = [*map(repr, list(record)[:8]), *(["..."] if len(record) > 8 else [])]
    return f"; it has {', '.join(names) or 'none'}" + fitting(record, template)
