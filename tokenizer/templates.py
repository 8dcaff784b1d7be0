"""Turns a record into a document: a prompt, which the model only reads, and a text, which it learns to predict. Chats are in chat.py."""

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
    """A prompt and what follows it, as they are. Each is encoded by itself."""
    return text_of(record, "prompt"), text_of(record, "completion")


TEMPLATES: dict[str, Callable[[dict, str], tuple[str, str]]] = {"plain": plain, "alpaca": alpaca, "completion": completion}


def fitting(record: dict) -> str:
    """What a record holds that lacks a field, and with which option it is read."""
    texts = [key for key, value in record.items() if isinstance(value, str)]
    if any(isinstance(record.get(key), list) for key in ("messages", "conversations", "completion")):
        option = "--template chat reads it"
    elif {"prompt", "completion"} <= record.keys():
        option = "--template completion reads it, or chat as a question and its answer"
    elif {"instruction", "output"} <= record.keys():
        option = "--template alpaca reads it, or chat as a question and its answer"
    else:
        option = f"--field {texts[0]} reads one" if texts else ""
    return f"; it has {', '.join(map(repr, record)) or 'none'}" + (f": {option}" if option else "")
