"""Names of temporary files, which tell who writes them."""

import os
import re
import secrets
import socket

TEMPORARY = re.compile(r"\.hf_trak-tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{16}")

"""Names of temporary files and directories; `hf_trak.store.atomic` says who removes them."""


def host_name() -> str:
    """Return the name of this host in the form that is part of the names of temporary files."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "unknown"


def temporary_name() -> str:
    """Make a name for a temporary file or directory that no other writer uses, of the form [`TEMPORARY`]."""
    return f".hf_trak-tmp-{host_name()}-{os.getpid()}-{secrets.token_hex(8)}"
