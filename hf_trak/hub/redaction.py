"""Removing secrets from addresses and messages before they are shown."""

import re

_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^\s'\"<>?#]*@")
_QUERY = re.compile(r"(?P<address>[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>?#]*)[?#][^\s'\"<>]*")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def without_secrets(text: str) -> str:
    """Replace user names, passwords and queries in the addresses of a text, and all tokens of the Hub, by `***`."""
    text = _USER.sub(f"{_HIDDEN}@", text)
    text = _QUERY.sub(lambda match: f"{match['address']}?{_HIDDEN}", text)
    return _TOKEN.sub(f"hf_{_HIDDEN}", text)


def address_without_secrets(address: str) -> str:
    """Replace everything before the last `@` of an address, and its query, by `***`.

    Unlike in [`without_secrets`], the address may lack its scheme, as in an environment variable.
    """
    scheme, mark, rest = address.rpartition("://")
    _, at, place = rest.rpartition("@")
    host, *query = re.split(r"[?#]", place, maxsplit=1)
    return without_secrets(f"{scheme}{mark}{_HIDDEN + '@' if at else ''}{host}{'?' + _HIDDEN if query else ''}")
