"""Decoding in processes of its own: an image that kills its process costs its own row only."""
