"""One model's tokenizer and chat template, as its folder defines them.

Invariant: text and tokens are turned into each other in this class only, and nothing here imports
torch or runs code from a model folder: the fast tokenizer reads `tokenizer.json`, and the chat
template runs in the sandbox of `transformers`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelRefused, ShoalError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TemplateRefused(ShoalError):
    """The model's chat template cannot render these messages; the text says why."""


class Tokenizer:
    """Immutable, and safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        # A tokenizer.json may ask for either; a served prompt is never cut or filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.has_chat_template = tokenizer.chat_template is not None
        self._is_byte_level = "ByteLevel" in repr(self._backend.decoder)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Raises `ModelRefused` when the folder holds no fast tokenizer."""
        if not (folder / "tokenizer.json").is_file():
            raise ModelRefused(f"no tokenizer.json in {folder}: only fast tokenizers are served")
        return cls(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, ready for the assistant's answer.

        Raises `TemplateRefused` with the template's own reason."""
        if not self.has_chat_template:
            raise TemplateRefused("this model has no chat template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the model's chat template refuses: {error}") from error
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A rendered chat holds its special tokens already; a raw prompt does not."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special tokens included."""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, also when they are a part of a character only."""
        text = self.token_text(token_id)
        token: str | None = self._backend.id_to_token(token_id)
        if _REPLACEMENT not in text or token is None:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        alphabet = _byte_alphabet()
        if self._is_byte_level and all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return text.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
