"""Chats, as a tokenizer's own template writes them: for prepare, and for `train_gpt sample`.

    python -m tokenizer.chat MODEL
    python -m tokenizer.chat MODEL --chat-template tokenizer/chat.jinja
    ./train_gpt sample --from MODEL --interactive on

takes the constant texts out of the template of the directory MODEL, or of FILE, checks with
conversations of one to three turns that they give exactly what the template gives, and writes
them to MODEL/chat.json, which tokenizer/chat.h explains. FILE becomes MODEL/chat_template.jinja, and
the token that ends an answer is added to those of MODEL/generation_config.json that end a text.
They go with the tokenizer into checkpoints. A template that writes today's date keeps it, and one
that can ask for thoughts (Qwen3) asks for none.

A template is Jinja, with what transformers gives it: chat_template.jinja, or else chat_template
in tokenizer_config.json, where it may be a list of named ones, of which `default` is taken.
"""

import argparse
import itertools
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tokenizer import vocabulary
from tokenizer.templates import ALPACA_FIELDS, COMPLETION_FIELDS, text_of

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
OPENS, CLOSES = "\udc00", "\udc01"  # around what {% generation %} holds; no text can have them
GENERATION = ("bos_token_id", "pad_token_id", "temperature", "top_k", "top_p", "repetition_penalty")  # old models have them in config.json
Span = tuple[int, int]


class ChatError(Exception):
    """A template that cannot be used, or a chat that it cannot write."""


class Generation(jinja2.ext.Extension):
    """{% generation %}, as transformers has it, marks what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller) -> str:
        return OPENS + caller() + CLOSES


def refuse(message: str):
    raise jinja2.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """names: what the template calls bos_token and so on. special: texts of special tokens."""

    def __init__(self, source: str, names: dict[str, str], special: Iterable[str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template is no Jinja: line {error.lineno}: {error}") from None
        except RecursionError:
            raise ChatError("the chat template is no Jinja that can be read: it is nested too deeply") from None
        self.source, self.names = source, names
        self.marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        self.special = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "(?!)")

    def render(self, messages: list[dict], ask: bool = False, thinks: bool = False) -> tuple[str, list[Span]]:
        """The text, and the places of what {% generation %} marks. ask: it ends with what asks for an answer; thinks: one with
        thoughts, by a template that can ask for both."""
        names = self.names if thinks else self.names | {"enable_thinking": False}
        try:
            marked = self.template.render(messages=messages, tools=None, documents=None, add_generation_prompt=ask, **names)
        except Exception as error:  # a template can do anything
            raise ChatError(f"the chat template refuses it: {error}") from None
        marks = re.findall(f"[{OPENS}{CLOSES}]", marked)
        if marks != [OPENS, CLOSES] * (len(marks) // 2):
            raise ChatError("the chat template cuts what {% generation %} holds, or has one within another")
        text, spans = "", []
        for number, piece in enumerate(re.split(f"[{OPENS}{CLOSES}]", marked)):
            if number % 2 == 1:
                spans.append((len(text), len(text) + len(piece)))
            text += piece.encode(errors="replace").decode()  # a template can write half of a surrogate pair
        return text, spans

    def thought(self) -> str:
        """What stands before an answer and says that it has no thoughts, by a template that can ask for them."""
        asks, thinks = (self.render([message("user", "x")], ask=True, thinks=thinks)[0] for thinks in (False, True))
        return asks[len(thinks):] if asks.startswith(thinks) else ""

    def around(self, messages: list[dict], number: int) -> tuple[str, str]:
        """What stands before and behind what a message says, with the blanks that a template leaves there."""
        empty = messages[number] | {"content": OPENS + CLOSES}
        text, spans = self.render([*messages[:number], empty, *messages[number + 1:]])
        if len(spans) != 1:
            raise ChatError(f"the chat template writes message {number + 1} not once")
        return text[: spans[0][0]], text[spans[0][0]:]

    def answers(self, messages: list[dict], whole: str) -> list[Span]:
        """Where the answers are, each with the token that ends it, of a template that does not mark them. An answer begins behind
        what asks for it. Where it has thoughts, and is the last one, that is what asks for thoughts; where other messages follow,
        a template may leave them out, and also what says that there are none."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            last, tail = self.around(messages[: number + 1], number)
            asked = self.render(messages[:number], ask=True)[0] if number > 0 else last
            before, behind = self.around(messages, number)
            lead = last[len(asked):]  # such as a blank
            begin, end = len(before) - len(lead), len(whole) - len(behind)
            good = last.startswith(asked) and before.endswith(lead) and behind.startswith(tail) and whole.endswith(behind)
            if good and not whole.startswith(before):
                asked = self.render(messages[:number], ask=True, thinks=True)[0]
                begin, good = len(asked), whole.startswith(asked)
            if not good or begin > end:
                raise ChatError(f"the chat template writes message {number + 1} in another way than it asks for it, or than where "
                                "other messages follow, so what is to be learned must be marked: put {% generation %} and "
                                "{% endgeneration %} around it in a copy of the template, and give it with --chat-template")
            ends = [match.end() for match in self.special.finditer(tail)]
            has_end = ends and not tail[ends[-1]:].strip()
            spans.append((begin, end + (ends[-1] if has_end else len(tail))))
        return spans

    def document(self, record: dict, counts: Counter) -> tuple[tuple[str, str], list[Span]]:
        """The chat of a record as a document: no prompt, its text, and which bytes of that are to be learned. Counts chats in which
        somebody says what becomes a special token, as `control`, and members that are not used."""
        messages, learned = messages_of(record, counts)
        text, spans = self.render(messages) if messages else ("", [])
        if not self.marks:
            spans = self.answers(messages, text)
        if not all(learned):
            if len(spans) != len(learned):
                raise ChatError(f"the chat template marks {len(spans)} parts of {len(learned)} answers, so it does not say which to "
                                "leave out, for its weight or because it belongs to the prompt")
            spans = [span for span, counts_too in zip(spans, learned) if counts_too]
        counts["control"] += any(self.special.search(message["content"]) for message in messages)
        return ("", text), [(len(text[:begin].encode()), len(text[:end].encode())) for begin, end in spans]


def count_ignored(counts: Counter, found: dict, used: Iterable[str], where: str) -> None:
    """Counts the members of `found` that say something and are not used."""
    counts.update(("ignored", key, where) for key, value in found.items() if value not in (None, "", [], {}) and key not in used)


def turns_of(record: dict) -> tuple[list[dict], int, tuple[str, ...]]:
    """What is said in a record, in order; how much of it is only read, whoever says it; and the members that hold it."""
    held = {key for key, value in record.items() if value is not None and value != []}  # tables have the columns of several formats
    lists = [key for key in ("conversations", "messages") if key in held]
    if not lists and "completion" in held:  # as TRL has them: lists of messages, or texts
        said = [[message(role, text_of(record, key))] if not isinstance(record[key], list) else record[key]
                for key, role in zip(COMPLETION_FIELDS, ("user", "assistant"))]
        return said[0] + said[1], len(said[0]), COMPLETION_FIELDS
    if not lists and "output" in held:
        asked = [text_of(record, key) for key in ("instruction", "input") if key == "instruction" or record.get(key)]
        said = message("user", "\n".join(text for text in asked if text.strip()))
        return [said, message("assistant", text_of(record, "output"))], 0, ALPACA_FIELDS
    key = next((key for key in (*lists, "conversations") if key in record), "messages")
    return record[key], 0, (key,)


def messages_of(record: dict, counts: Counter) -> tuple[list[dict], list[bool]]:
    """The messages of a record, in the spelling of OpenAI, or of ShareGPT; and which of the assistant's are to be learned."""
    turns, read, used = turns_of(record)
    messages, learned = [], []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise TypeError("its messages are not a list of objects with a role and a content")
    for number, turn in enumerate(turns, 1):
        role, content = (turn.get(other) if turn.get(key) is None else turn[key] for key, other in (("role", "from"), ("content", "value")))
        if not isinstance(role, str) or role not in ROLES:
            raise TypeError(f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
        if turn.get("tool_calls") or turn.get("function_call"):
            raise TypeError(f"message {number} calls a tool, which is not text and would not be learned: leave such chats out")
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") == "text":
            content = content[0].get("text")
        if not isinstance(content, str):
            raise TypeError(f"the content of message {number} is {type(content).__name__}, not text: allowed is text, or a list of one part of text")
        weight, trains = turn.get("weight"), turn.get("train")
        if weight not in (None, 0, 1) or trains not in (None, False, True):
            raise TypeError(f"message {number} has the weight {weight!r}, and 'train' {trains!r}: allowed are 0 and 1, false and true")
        if ROLES[role] == "assistant":
            learned.append(number > read and weight != 0 and trains != 0)
        count_ignored(counts, turn, ("role", "from", "content", "value", "weight", "train"), "message")
        messages.append({"role": ROLES[role], "content": content})
    system, begins = record.get("system"), messages[0]["role"] if messages else "none"
    instructs = isinstance(system, str) and begins != "system"
    if instructs and system:
        messages.insert(0, {"role": "system", "content": system})
    count_ignored(counts, record, (*used, *(["system"] if instructs else [])), "record")
    return messages, learned


def load(name: str, tokenizer: Tokenizer, file: str | None) -> ChatTemplate:
    """The chat template of a tokenizer that was loaded by `name`, or that of a file."""
    path = Path(name).parent if Path(name).is_file() else Path(name)
    try:
        config, special, added = (json.loads((path / member).read_bytes()) if (path / member).is_file() else {}
                                  for member in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"))
        beside = path / "chat_template.jinja"
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {template["name"]: template["template"] for template in source}.get("default")
        if file is not None or beside.is_file():
            source = Path(file or beside).read_text("utf-8")
        is_gpt2 = ((config.get("tokenizer_class") or "GPT2Tokenizer").startswith("GPT2")  # to which transformers gives these
                   and any(token.content == vocabulary.END_OF_TEXT for token in tokenizer.get_added_tokens_decoder().values()))
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), vocabulary.END_OF_TEXT) if is_gpt2 else {}
        for key, value in (special | config).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
        added = vocabulary.declared_tokens(config, added)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ChatError(f"the chat template of {name} cannot be read: {error}") from None
    if not isinstance(source, str):
        raise ChatError(f"{name} has no chat template: give one with --chat-template, such as tokenizer/chat.jinja")
    written = {text for key, text in names.items() if key in source}
    if absent := sorted(text for text in added if (text in source or text in written) and tokenizer.token_to_id(text) is None):
        raise ChatError(f"the chat template of {name} writes {absent[0]!r}, which a file beside tokenizer.json calls a token and it does "
                        "not have: transformers puts it there in Python, by AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")
    return ChatTemplate(source, names, (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special))


# The constant texts of a template


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def split(text: str, *said: str) -> list[str]:
    """What stands around the texts that were said."""
    pieces = []
    for one in said:
        before, found, text = text.partition(one)
        if not found or one in text:
            raise ChatError("the chat template changes what is said, or writes it not once")
        pieces.append(before)
    return [*pieces, text]


def derive(template: ChatTemplate, instructed: bool) -> tuple[dict, str, str, str]:
    """What goes into chat.json, with a system text if that is `instructed`; the blanks before an answer that the model writes (Llama 2,
    Mistral), and those between it and its end; and what ends a chat, from there on."""
    said = ("Said One.", "Said Answer.", "Said Two.")
    one, answer, two = message("user", said[0]), message("assistant", said[1]), message("user", said[2])
    asks = split(template.render([one], ask=True)[0], said[0])
    *first, between, after = split(template.render([one, answer, two], ask=True)[0], *said)
    tail = split(template.render([one, answer])[0], *said[:2])[-1]
    lead = first[1][len(asks[1]):] if first[1].startswith(asks[1]) and first[1][len(asks[1]):].isspace() else ""
    first[1] = first[1].removesuffix(lead)
    thought = asks[1].removeprefix(first[1])
    if asks != [first[0], first[1] + thought]:
        raise ChatError("the chat template begins an answer in another way than it asks for it, or where other messages follow")
    try:
        around = split(template.render([message("system", "Said System."), one], ask=True)[0], "Said System.", said[0])
        around[2] = around[2].removesuffix(thought)
        around = around if instructed else None
    except ChatError:
        around = None
    end = template.special.search(between)
    if end is None or between[: end.start()].strip() or not tail.startswith(between[: end.end()]):
        raise ChatError(f"the chat template ends an answer with {tail!r}, which begins with no special token of the tokenizer: "
                        "train_gpt would not know where an answer ends; end it with {{ eos_token }} in a template of your own")
    pieces = {"first": first, "system": around, "next": [between[end.start():], after.removesuffix(thought)], "end": end.group()}
    pieces |= {"thought": thought} if thought else {}
    padded = [message("system", " Said System.\n")][: around is not None] + [message("user", "\n Said One. ")]
    trimmed = [said | {"content": said["content"].strip()} for said in padded]
    pieces |= {"trim": True} if template.render(padded, ask=True) == template.render(trimmed, ask=True) else {}
    return pieces, lead, between[: end.start()], tail[end.start():]


SAID = ("What is 2 + 2?", "Write two lines:\none\ntwo", "Où est la 狐? <b>&amp;</b> \"it's\" {{ x }} 🙂", "a")


def check(template: ChatTemplate, pieces: dict, lead: str, blank: str, tail: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Compares with the template. Returns how many conversations were, and in how many an answer by itself has other tokens."""
    count = odd = 0
    thought = pieces.get("thought", "")
    for turns, offset, instructed in itertools.product((1, 2, 3), range(len(SAID)), (False, True)[: 1 + (pieces["system"] is not None)]):
        said = itertools.cycle(SAID[offset:] + SAID[:offset])
        messages = [message("system", next(said))] if instructed else []
        start, around = ("", pieces["first"]) if not instructed else (
            pieces["system"][0] + messages[0]["content"], pieces["system"][1:])
        parts = [start]
        for turn in range(turns):
            messages.append(message("user", next(said)))
            before, after = pieces["next"] if turn else around
            parts[-1] += before + messages[-1]["content"] + after
            if "".join(parts) + thought != template.render(messages, ask=True)[0]:
                raise ChatError(f"the chat template does not write {turn + 1} turns as it writes one")
            messages.append(message("assistant", next(said)))
            parts.append(lead + messages[-1]["content"] + blank)
        parts[-1:] = [thought, parts[-1] + tail]
        if "".join(parts) != template.render(messages)[0]:
            raise ChatError("the chat template ends a chat in another way than an answer")
        count += 1
        # BPE of characters puts a blank in front of a text, and so must not see an answer by itself.
        whole, *asked = (tokenizer.encode("".join(parts[:end]), add_special_tokens=False).ids for end in (None, *range(1, turns), turns + 1))
        odd += any(whole[: len(ids)] != ids for ids in asked)
    return count, odd


def ends_of(directory: Path, end: int | None) -> dict[str, str]:
    """The generation_config.json that also stops at the end of an answer, as transformers and others read it; nothing if it does
    already, or if no token is known that ends a text. A model that was trained without chats does not stop there."""
    held = {}
    for name in ("generation_config.json", "config.json"):
        try:
            held[name] = json.loads((directory / name).read_bytes()) if (directory / name).is_file() else {}
            found = held[name].get("eos_token_id")
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            raise ChatError(f"{directory / name} cannot be read: {error}") from None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if ids:
            break
    if not ids or end in ids or not all(type(number) is int for number in ids):
        return {}
    # With _from_model_config, transformers would take the tokens of config.json again.
    kept = held["generation_config.json"] or {key: held["config.json"][key] for key in GENERATION if key in held["config.json"]}
    kept = {key: value for key, value in kept.items() if key != "_from_model_config"} | {"eos_token_id": [*ids, end]}
    return {"generation_config.json": json.dumps(kept, indent=2) + "\n"}


def write(directory: Path, files: dict[str, str]) -> None:
    """Each file whole or not at all. The checksums of a model that train_gpt wrote stay true."""
    sums = directory / "checksums.json"
    if sums.is_file():
        crcs = {name: zlib.crc32(content.encode()) for name, content in files.items()}
        files["checksums.json"] = json.dumps(json.loads(sums.read_bytes()) | crcs, indent=1, sort_keys=True)
    for name, content in files.items():
        temporary = directory / (name + ".new")
        temporary.write_bytes(content.encode())
        os.replace(temporary, directory / name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the directory of a model, or of its tokenizer")
    parser.add_argument("--chat-template", metavar="FILE", help="a template of your own")
    found = parser.parse_args(arguments)
    try:
        if not found.model.is_dir():
            raise ChatError(f"there is no directory {found.model}")
        tokenizer = vocabulary.load(str(found.model))
        template = load(str(found.model), tokenizer, found.chat_template)
        try:
            moves = False
            try:
                pieces, *blanks = derive(template, True)
                count, odd = check(template, pieces, *blanks, tokenizer)
            except ChatError:  # a system text may stand elsewhere in later turns (Mistral)
                moves = True
                pieces, *blanks = derive(template, False)
                count, odd = check(template, pieces, *blanks, tokenizer)
        except ChatError as error:
            raise ChatError(f"{found.chat_template or found.model}: {error}; train_gpt sample needs a template that can be taken apart "
                            "into constant texts: give a simpler one with --chat-template (tokenizer.prepare takes this one, too)") from None
        own = {"chat_template.jinja": template.source} if found.chat_template is not None else {}
        ends = ends_of(found.model, tokenizer.token_to_id(pieces["end"]))
        write(found.model, own | ends | {"chat.json": json.dumps(pieces, indent=1, ensure_ascii=False) + "\n"})
    except (ChatError, vocabulary.TokenizerError, OSError, ValueError, TypeError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 2
    system = ("takes a system text" if pieces["system"] is not None else "takes no system text" if not moves else
              "puts a system text elsewhere in later turns, so train_gpt sample gives it none")
    print(f"{found.model}/chat.json: the template {system}, and an answer ends with {pieces['end']}; "
          f"{count} conversations come out as the template writes them")
    if ends:
        print(f"{found.model}/generation_config.json: a text ends with {pieces['end']}, too, where transformers generates it")
    if "thought" in pieces:
        print(f"an answer is asked for without thoughts: {pieces['thought']!r} stands before it, until another message follows")
    if odd:
        print(f"in {odd} of them an answer has other tokens after what asks for it than within the whole text: a template that "
              "ends what asks for an answer with a line end, not a blank, avoids that")
    return 0


if __name__ == "__main__":
    sys.exit(main())
