"""Turns a record into a document: a list of segments (text, counts), which are predicted where they count."""

from collections.abc import Callable

Segments = list[tuple[str, bool]]

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


def plain(record: dict, field: str) -> Segments:
    """One field, which counts."""
    text = record[field]
    if not isinstance(text, str):
        raise TypeError(f"field '{field}' holds {type(text).__name__}, not text")
    return [(text, True)]


def alpaca(record: dict, _field: str) -> Segments:
    """A prompt with instruction and input, which does not count, and the output, which counts.

    The prompt ends with a line end and is encoded by itself, so the same prompt has the same tokens when sampling.
    """
    template = ALPACA_WITH_INPUT if record.get("input") else ALPACA_WITHOUT_INPUT
    prompt = template.format(instruction=record["instruction"], input=record.get("input", ""))
    return [(prompt, False), (record["output"], True)]


TEMPLATES: dict[str, Callable[[dict, str], Segments]] = {"plain": plain, "alpaca": alpaca}
MASKED = {"alpaca"}  # templates with segments that do not count
