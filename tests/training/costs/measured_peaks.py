"""The largest memory of a simulated rank in a training run."""

from benchmarks.allocated import peak_allocated
from workbench.testing import run_ranks
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_strategy


def peak_of(job: Job, text: str, watched: int, num_ranks: int = 2) -> int:
    """Bytes on the rank ``watched``; torch profiles the memory of one thread."""

    def program(rank: int) -> int:
        if rank == watched:
            return peak_allocated(job, text)
        run_strategy(job, text)
        return 0

    return run_ranks(program, num_ranks)[watched]
