"""In: raw rows. Out: latents and caption embeddings, in a folder (`job`) or on their way to the trainers (`online`).

Read `encoder` first: the actor. The driver runs `prepare` or `prepare_online` before a job or a run; CPU tasks run
`stages`. To reuse the actor elsewhere, copy `encoder`, `models`, `latents.schema` and `distributed`.
"""
