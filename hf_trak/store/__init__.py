"""The feature store: shards, their identities and checksums, atomic files, and verification."""
