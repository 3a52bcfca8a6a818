"""StreamingDataset and StreamingDataLoader, as the pages on fast resumption and elastic determinism say.

Tried: rank 0's `state_dict()`, loaded by all ranks; the same `num_canonical_nodes` in all runs; a batch size that the
numbers of ranks divide; one worker process a rank; shared memory of the killed run removed, as the FAQ says.
"""

import ranks
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def write(folder, rows):
    with MDSWriter(out=folder, columns={"id": "int", "latents": "bytes", "text": "bytes"}) as writer:
        for number in range(rows):
            writer.write(ranks.made_up_row(number))


class Counting(StreamingDataset):
    """Rows say how many their process has read so far."""

    num_read = 0

    def get_item(self, sample_id, retry=7):
        self.num_read += 1
        return {**super().get_item(sample_id, retry), "read": self.num_read}


def train(folder, run):
    options = {"shuffle": True, "shuffle_seed": ranks.SEED, "batch_size": run.rank_batch}
    # resume:
    clean_stale_shared_memory()
    options["num_canonical_nodes"] = 1
    # end
    data = Counting(local=folder, **options)
    loader = StreamingDataLoader(
        data, batch_size=run.rank_batch, num_workers=1, drop_last=True, collate_fn=ranks.collate
    )
    saved = run.saved()
    if saved:
        # resume:
        loader.load_state_dict(saved["loader"])
        # end
    for epoch in range(run.first_epoch, ranks.EPOCHS):
        for batch in run.together(loader):
            run.note(epoch, batch)
            if run.saves_now:
                # resume:
                state = {"loader": loader.state_dict()}
                # end
                run.save(epoch, **state)


ranks.main(write, train)
