"""JSON that ends in a hash of itself: `{..., "seal": "<64 digits>"}`.

The digits are the SHA-256 of every byte before the seal, preceded by the bytes outside that belong to it. The bytes are
hashed as they stand, so nobody has to agree on a canonical spelling.
"""

from __future__ import annotations

import hashlib
import re

from penstock.schema import SchemaError

_SEAL = re.compile(rb', "seal": "([0-9a-f]{64})"\}\Z')
SEAL_BYTES = len(b', "seal": ""}') + 64


def sealed(text: str, outside: bytes = b"") -> bytes:
    """`text` is a JSON object with at least one key; `outside` is what belongs to it and stands elsewhere."""
    body = text.encode().removesuffix(b"}")
    return body + b', "seal": "' + hashlib.sha256(outside + body).hexdigest().encode() + b'"}'


def unsealed(raw: bytes, outside: bytes = b"") -> str:
    """The object without its seal. Raises SchemaError if the seal does not match what precedes it."""
    found = _SEAL.search(raw[-SEAL_BYTES:])
    if found is None:
        raise SchemaError("it does not end in a seal: it is damaged, or was written by another release")
    body = raw[:-SEAL_BYTES]
    digest = hashlib.sha256(outside + body).hexdigest()
    if digest.encode() != found[1]:
        raise SchemaError(
            f"its seal is {found[1].decode()[:16]}..., its bytes need {digest[:16]}...: something was changed"
        )
    try:
        return (body + b"}").decode()
    except UnicodeDecodeError as error:
        raise SchemaError(f"it is not UTF-8: {error}") from error
