"""In: raw rows. Out: latents and caption embeddings, in a folder that `latents` reads.

Read `encoder` first: the actor. `captions` tokenizes. CPU tasks run `stages`. The driver runs `prepare`, then `job`.
"""
