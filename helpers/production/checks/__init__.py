"""What is refused before a cluster is busy, in one sentence each. The core has the first three checks itself."""
