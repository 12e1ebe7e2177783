"""The cluster secret: a file that only its owner may read. It is never in a tree or an argument."""

import secrets
from hashlib import blake2b
from pathlib import Path

_MIN_BYTES = 32
_MAX_BYTES = 64


class SecretError(ValueError):
    """A secret file that cannot be used, and why."""


def read_secret(path: str | Path) -> bytes:
    """Its content, at most 64 bytes of it. Raises `SecretError`."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        secret = file.read_bytes().strip()[:_MAX_BYTES]
    except OSError as error:
        raise SecretError(f"cluster_secret_file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise SecretError(f"cluster_secret_file {path} must not be accessible to others (0600)")
    if len(secret) < _MIN_BYTES:
        raise SecretError(
            f"cluster_secret_file {path} has {len(secret)} bytes; at least {_MIN_BYTES} are needed"
        )
    return secret


def derive_key(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one `purpose` (1 to 16 ASCII characters). None of them tells of the secret or of
    another purpose's, and none is a block key: BLAKE2b (RFC 7693) keyed with the secret, the
    purpose as its personalisation, which block keys leave empty. `secret` is 16 to 64 bytes."""
    person = purpose.encode("ascii")
    if not 1 <= len(person) <= blake2b.PERSON_SIZE:
        raise ValueError(f"a purpose has 1 to {blake2b.PERSON_SIZE} characters: {purpose!r}")
    return blake2b(digest_size=32, key=secret, person=person).digest()


def write_secret(path: Path) -> None:
    """Makes a new one. Raises `FileExistsError` rather than replace one."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(_MIN_BYTES))
