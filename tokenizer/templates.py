"""What a document is made of: a list of segments, (text, counts). Where counts is false, the model is not to predict it."""

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
    """One field, all of which counts."""
    text = record[field]
    if not isinstance(text, str):
        raise TypeError(f"field '{field}' holds {type(text).__name__}, not text")
    return [(text, True)]


def alpaca(record: dict, _field: str) -> Segments:
    """instruction and input as a prompt, which does not count, and output, which does.

    The prompt ends with a line end and is encoded by itself, so that a prompt given at sampling has the same tokens.
    """
    template = ALPACA_WITH_INPUT if record.get("input") else ALPACA_WITHOUT_INPUT
    prompt = template.format(instruction=record["instruction"], input=record.get("input", ""))
    return [(prompt, False), (record["output"], True)]


TEMPLATES: dict[str, Callable[[dict, str], Segments]] = {"plain": plain, "alpaca": alpaca}
MASKED = {"alpaca"}  # templates with segments that do not count
