"""A thousand chats, and templates for them, the last four with the constructs of published ones, which write the same: what test_chat.py
and dev/reference/check_chats.py compare with transformers. dev/reference/make_chats.py makes the values of the first."""

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
THOUGHTS = ("<think>", "</think>")  # tokens that are not special
WORDS = ("fox", "the mill", "12", "naïve", "狐は", "it's", "\n", "\n\n", "🙂", "  ", "<b>", "{{ x }}", "Où", "?!", "<|im_end|>",
         "<|endoftext|>", "a\u00a0b", "\t", "don't", "\"quoted\"", "<|eot_id|>", "<think>", "</think>", "\n</think>\n\n", "e\u0301")
BLANKS = ("", "", "", "", " ", "\n", "\n\n ", "\t", "\u3000")

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
DEFAULT = """{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}{%- endif %}
"""
QWEN2 = DEFAULT.replace("SYSTEM", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.") + CHATML
SMOLLM2 = DEFAULT.replace("SYSTEM", "You are a helpful AI assistant named SmolLM, trained by Hugging Face") + CHATML
# Thoughts are left out where the user says more, and an empty one stands before the last answer.
QWEN3 = """{%- set place = namespace(asked=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set place.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set parts = message.content.split('</think>') %}
    {%- set thought = parts[0].rstrip('\\n').split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role != 'assistant' %}{{- message.content + '<|im_end|>' }}
    {%- else %}
        {%- set answer = message.content if parts | length == 1 else parts[-1].lstrip('\\n') %}
        {%- set thinks = loop.index0 > place.asked and (loop.last or thought) %}
        {%- set answer = answer.lstrip('\\n') if thinks else answer %}
        {%- if thinks and not thought %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {%- if thinks and thought %}{%- set answer = '<think>\\n' + thought + '\\n</think>\\n\\n' + answer %}{%- endif %}
        {% generation %}{{- answer + '<|im_end|>' }}{% endgeneration %}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
# A form without a % is what strftime writes.
LLAMA3 = """{{- bos_token }}
{%- set today = date_string if date_string is defined else strftime_now('DATE') %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' + today }}
{{- '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "zephyr": ZEPHYR, "smollm2": SMOLLM2, "qwen2": QWEN2, "qwen3": QWEN3,
             "llama3": LLAMA3.replace("DATE", "26 Jul 2024")}
SAID = [{"role": "system", "content": " Be kind.\n"}, {"role": "user", "content": "The fox? "}, {"role": "assistant", "content": "It's the mill."},
        {"role": "user", "content": "naïve 12"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}


def chats(count: int = COUNT, seed: int = 5) -> list[list[dict]]:
    """One to six turns, of which some have no answer yet, some after a system text."""
    draw, made = random.Random(seed), []

    def say(role: str) -> dict:
        text = " ".join(draw.choices(WORDS, k=draw.randint(0, 8))) + draw.choice(("", ".", " x", "é", "🙂"))
        return {"role": role, "content": draw.choice(BLANKS) + text + draw.choice(BLANKS)}

    for _ in range(count):
        messages = [say("system")] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 6)):
            messages += [say("user"), say("assistant")]
        made.append(messages[:-1] if draw.random() < 0.1 and len(messages) > 3 else messages)
    return made


def write_tokenizer(directory: Path, template: str) -> None:
    """The reference tokenizer with the templates' special tokens."""
    tokenizer = vocabulary.load(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THOUGHTS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **NAMES}))


def digest(encoded: Iterable[tuple[list[int], list[int]]]) -> str:
    """Of the tokens and masks of all chats."""
    sha = hashlib.sha256()
    for ids, mask in encoded:
        sha.update(struct.pack(f"<I{len(ids)}H", len(ids), *ids) + bytes(mask))
    return sha.hexdigest()
