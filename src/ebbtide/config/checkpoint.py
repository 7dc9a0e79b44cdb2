"""The section `checkpoint`."""

from __future__ import annotations

from ebbtide.config.base import Count, Natural, Positive, Section


class CheckpointConfig(Section):
    """Checkpoints hold all that a run needs to resume, and the weights to use elsewhere (`ebbtide export`)."""

    every: Count | None = 50
    """Steps between checkpoints; `null` writes none along the way. One is always written after the last step, and when
    the run is stopped by Ctrl-C or SIGTERM."""

    minutes: Positive | None = None
    """Also write a checkpoint when the last one is this many minutes old."""

    deadline_minutes: Positive | None = None
    """Time limit of the run: it stops with a checkpoint when another step might not finish within it. For queues that
    kill jobs."""

    keep: Count = 1
    """How many of the newest checkpoints to keep."""

    keep_best: Natural = 1
    """How many of the checkpoints with the largest `metric` to keep."""

    metric: str = "reward"
    """Key of metrics.jsonl by which checkpoints are ranked, such as `evaluate/reward`."""

    async_save: bool = True
    """The loop waits only until device tensors are copied to host memory; another process writes them while training
    continues. Off: the loop waits until everything is written, and no host memory is needed."""

    fully_parallel_save: bool = True
    """Replicated tensors are written in parallel, one slice per rank. Off: rank 0 writes them, for storage that does
    not cope with parallel writers. Each rank writes its own shards in any case."""

    fully_parallel_load: bool = True
    """Replicated tensors are read in parallel, one slice per rank, and exchanged. Off: rank 0 reads and broadcasts
    them. Each rank reads its own shards in any case."""

    load_rng: bool = True
    """Restore the random number generators as well, so that a resumed run continues bit for bit as if it had never
    stopped."""
