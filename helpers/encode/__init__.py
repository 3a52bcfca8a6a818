"""In: raw rows. Out: latents and caption embeddings, in a folder (`job`) or on their way to the trainers (`online`).

Read `encoder` first: the actor. `prepare` and `prepare_online` are what the driver does before a job or run.
To copy: `encoder` with `captions`, `models` and `latents.schema`.
"""
