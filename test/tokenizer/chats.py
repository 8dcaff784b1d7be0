"""A thousand chats, and three templates for them: what test_chat.py compares with transformers, whose values
dev/reference/make_chats.py makes."""

import hashlib
import json
import random
import struct
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken

from testing import TOKENIZER
from tokenizer import vocabulary

COUNT = 1000
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
WORDS = ("fox", "the mill", "12", "naïve", "狐は", "it's", "\n", "\n\n", "🙂", "  ", "<b>", "{{ x }}", "Où", "?!", "<|im_end|>",
         "<|endoftext|>", "a\u00a0b", "\t", "don't", "\"quoted\"")

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% if loop.index0 == 0 %}{% set head = bos_token + head %}{% endif %}
{{- head }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- endif %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "zephyr": ZEPHYR}
NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}


def chats(count: int = COUNT, seed: int = 5) -> list[list[dict]]:
    """One to four turns, of which some have no answer yet, some after a system text."""
    draw, made = random.Random(seed), []

    def say(role: str) -> dict:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(0, 8))) + draw.choice(("", ".", " x", "é", "🙂"))}

    for _ in range(count):
        messages = [say("system")] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 4)):
            messages += [say("user"), say("assistant")]
        made.append(messages[:-1] if draw.random() < 0.1 and len(messages) > 3 else messages)
    return made


def write_tokenizer(directory: Path, template: str) -> None:
    """The reference tokenizer with the templates' special tokens."""
    tokenizer = vocabulary.load(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **NAMES}))


def digest(encoded: Iterable[tuple[list[int], list[int]]]) -> str:
    """Of the tokens and masks of all chats."""
    sha = hashlib.sha256()
    for ids, mask in encoded:
        sha.update(struct.pack(f"<I{len(ids)}H", len(ids), *ids) + bytes(mask))
    return sha.hexdigest()
