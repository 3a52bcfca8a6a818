"""StreamingDataset and StreamingDataLoader, as LitData's README says under "Pause, resume data streaming".

Tried: rank 0's `state_dict()`, loaded by all ranks, also by other numbers of them ("elastic resume",
pull request 878); `shuffle=True`, `drop_last=True`, the same seed; one worker process a rank; data by `optimize`.
"""

import litdata
import ranks


def write(folder, rows):
    litdata.optimize(
        fn=ranks.made_up_row, inputs=list(range(rows)), output_dir=folder, chunk_bytes="64MB", num_workers=1
    )


class Counting(litdata.StreamingDataset):
    """Rows say how many their process has read so far."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return {**super().__getitem__(index), "read": self.num_read}


def train(folder, run):
    data = Counting(folder, shuffle=True, drop_last=True, seed=ranks.SEED)
    loader = litdata.StreamingDataLoader(data, batch_size=run.rank_batch, num_workers=1, collate_fn=ranks.collate)
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


if __name__ == "__main__":
    ranks.main(write, train)
