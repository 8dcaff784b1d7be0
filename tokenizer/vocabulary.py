"""Loads a tokenizer by directory or name; computes the sum that identifies it in token files and in train_gpt."""

import codecs
import json
import os
import ssl
import struct
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

END_OF_TEXT = "<|endoftext|>"


def end_of(tokenizer: Tokenizer, name: str) -> str | None:
    """The added token behind a text, of a tokenizer that was loaded by `name`: tokenizer_find_end in tokenizer.h."""
    path = Path(name)
    directory = path if path.is_dir() else path.parent if path.is_file() else None
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    if END_OF_TEXT in added.values():
        return END_OF_TEXT
    for beside in ("tokenizer_config.json", "generation_config.json", "config.json") if directory is not None else ():
        try:
            config = json.loads((directory / beside).read_bytes())
            token, number = config.get("eos_token"), config.get("eos_token_id")
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        number = number[0] if isinstance(number, list) and number else number
        found = token if isinstance(token, str) else added.get(number) if type(number) is int else None
        if found in added.values():
            return found
    return None


class TokenizerError(Exception):
    """A tokenizer that is missing or cannot be used."""


def byte_level(model: BPE) -> Tokenizer:
    """A tokenizer like GPT-2's: bytes as letters, GPT-2's pattern, no prefix space, no normalization."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_file(path: Path) -> Tokenizer:
    return Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))


def declared_tokens(config: dict, added: dict) -> set[str]:
    """What tokenizer_config.json and added_tokens.json call tokens. tokenizer.json may lack some."""
    return {*added, *(token["content"] for token in (config.get("added_tokens_decoder") or {}).values())}


def _refuse_others(path: Path) -> None:
    """Vocabulary and merges do not say how texts are cut, nor what was added: only GPT-2's are known. Qwen's tokenizers have such files, too."""
    config, added = (json.loads((path / name).read_bytes()) if (path / name).is_file() else {} for name in ("tokenizer_config.json", "added_tokens.json"))
    kind = config.get("tokenizer_class") or "GPT2Tokenizer"
    others = declared_tokens(config, added) - {END_OF_TEXT}
    if not kind.startswith("GPT2") or others:
        what = f"is a {kind}" if not kind.startswith("GPT2") else f"has added tokens such as {sorted(others)[0]!r}"
        raise TokenizerError(f"{path} has no tokenizer.json, and {what}: transformers makes one in Python, by "
                             "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")


def _from_directory(path: Path) -> Tokenizer:
    if (path / "tokenizer.json").is_file():
        return _from_file(path / "tokenizer.json")
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (path / vocabulary).is_file() and (path / merges).is_file():
            _refuse_others(path)
            tokenizer = byte_level(BPE.from_file(str(path / vocabulary), str(path / merges)))
            tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
            return tokenizer
    raise TokenizerError(
        f"{path} has no tokenizer.json, no vocab.json with merges.txt and no encoder.json with vocab.bpe"
    )


def _from_hub(name: str) -> Tokenizer:
    """Where the hub cannot be reached, only what an earlier download has left: the library would try for 23 s."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    reason = None
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:  # it answers
        pass
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if not isinstance(cause, ssl.SSLError):  # the library may have other certificates
            reason = cause
            os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return Tokenizer.from_pretrained(name)
    except Exception:  # the library raises bare exceptions
        if reason is None:
            raise
        raise TokenizerError(
            f"there is no directory '{name}', and {hub} cannot be reached ({reason}): download the tokenizer.json of "
            f"'{name}' where there is a network, and give the directory that holds it"
        ) from None


def load(name: str) -> Tokenizer:
    """Loads a directory, a tokenizer.json, or a name on the Hugging Face hub such as gpt2, which needs a network."""
    path = Path(name)
    try:
        if path.is_dir():
            tokenizer = _from_directory(path)
        elif path.is_file():
            tokenizer = _from_file(path)
        elif path.suffix == ".json" or name.startswith((".", "/")):
            raise TokenizerError(f"there is no tokenizer {name}")
        else:
            tokenizer = _from_hub(name)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"cannot load the tokenizer '{name}' ({error}): give a directory that holds it") from error
    if end_of(tokenizer, name) is None:
        raise TokenizerError(f"the tokenizer '{name}' has no token {END_OF_TEXT}, and neither tokenizer_config.json nor config.json "
                             "beside it names another of its added tokens as eos_token: one is put behind each document")
    return tokenizer


def front_of(tokenizer: Tokenizer) -> str | None:
    """The token that the post-processor puts in front of a text."""
    text, whole = (tokenizer.encode("a", add_special_tokens=special).tokens for special in (False, True))
    return whole[0] if whole[1 : 1 + len(text)] == text and whole[: len(text)] != text else None


def size(tokenizer: Tokenizer) -> int:
    """The largest id plus one; ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def sum_of(tokenizer: Tokenizer) -> int:
    """CRC-32 of all tokens in the order of their ids and all merges in theirs; tokenizer.h computes the same.

    What is summed: for each token its id, the length of its text in UTF-8, and that text as in tokenizer.json; for each merge
    the ids of both sides. Numbers are uint32, little-endian.
    """
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary, found = model["vocab"], 0
    for text, token in sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        data = text.encode()
        found = zlib.crc32(struct.pack("<II", token, len(data)) + data, found)
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found = zlib.crc32(struct.pack("<II", vocabulary[left], vocabulary[right]), found)
    return found
