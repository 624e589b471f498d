"""Addresses and messages without what nobody else should see."""

import re

_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^\s'\"<>?#]*@")
_QUERY = re.compile(r"(?P<address>[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>?#]*)[?#][^\s'\"<>]*")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def without_secrets(text: str) -> str:
    """A text without user names and passwords in addresses, without their queries, and without tokens of the Hub."""
    text = _USER.sub(f"{_HIDDEN}@", text)
    text = _QUERY.sub(lambda match: f"{match['address']}?{_HIDDEN}", text)
    return _TOKEN.sub(f"hf_{_HIDDEN}", text)


def address_without_secrets(address: str) -> str:
    """An address that may lack its scheme, as somebody may set it: nothing before the last `@`, no query."""
    scheme, mark, rest = address.rpartition("://")
    _, at, place = rest.rpartition("@")
    host, *query = re.split(r"[?#]", place, maxsplit=1)
    return without_secrets(f"{scheme}{mark}{_HIDDEN + '@' if at else ''}{host}{'?' + _HIDDEN if query else ''}")
