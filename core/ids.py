"""Identifiers: unique without asking anybody."""

import re
import secrets

REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def new_request_id() -> str:
    """A request id for a client that gave none."""
    return f"req-{secrets.token_hex(12)}"


def new_incarnation() -> str:
    """Names one life of a process: a restart at the same address gets another."""
    return secrets.token_hex(8)


def new_transfer_id() -> bytes:
    """16 random bytes that name one KV transfer; unguessable, so a stale or forged frame finds no session."""
    return secrets.token_bytes(16)
