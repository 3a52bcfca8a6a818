"""torchdata's StatefulDataLoader over an IterableDataset of `datasets`, as the page on PyTorch says.

Tried: each rank's own `state_dict()`, because StatefulDataLoader gathers states of worker processes, but not of ranks;
`split_dataset_by_node` with a number of files that the ranks divide; the default shuffle buffer of 1,000 rows, whose
rows are lost when resuming, as the documentation of `IterableDataset.state_dict` says; one worker process a rank.
"""

import pathlib

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import ranks
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

FILES = 16


def write(folder, rows):
    pathlib.Path(folder).mkdir(parents=True)
    for file in range(FILES):
        numbers = range(rows * file // FILES, rows * (file + 1) // FILES)
        pq.write_table(
            pa.Table.from_pylist([ranks.made_up_row(number) for number in numbers]),
            f"{folder}/{file:02d}.parquet",
            row_group_size=64,
            compression="none",
            use_dictionary=False,
        )


def train(folder, run):
    files = sorted(map(str, pathlib.Path(folder).glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = split_dataset_by_node(data.shuffle(seed=ranks.SEED, buffer_size=1000), run.rank, run.world)
    loader = StatefulDataLoader(
        data, batch_size=run.rank_batch, num_workers=1, drop_last=True, collate_fn=ranks.collate
    )
    saved = run.saved(of_rank=True)
    if saved:
        # resume:
        loader.load_state_dict(saved["loader"])
        # end
    for epoch in range(run.first_epoch, ranks.EPOCHS):
        data.set_epoch(epoch)
        for batch in run.together(loader):
            run.note(epoch, batch)
            if run.saves_now:
                # resume:
                state = {"loader": loader.state_dict()}
                # end
                run.save(epoch, of_rank=True, **state)


ranks.main(write, train)
