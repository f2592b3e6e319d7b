"""Shares out the conversion of a large data set among several processes, and keeps the order."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

# A process needs several seconds to import what the recipe imports. It tokenises about this many
# rows in the same time.
ROWS_PER_WORKER = 20_000
# One process writes what all workers return, about thirty times faster than one worker tokenises.
MOST_WORKERS = 32

# The function of a worker; see `start_worker`.
task: Callable[[range], Any]


def number_for(rows: int, function: Callable[[range], Any]) -> int:
    """Returns how many processes are worth their start for a data set of so many rows.

    One process of each machine tokenises. It takes its share of the cores that it may use, because
    the processes that wait for it may use theirs. Example: 100,000 rows on 64 cores with 8 training
    processes are shared out among 5.

    Args:
        function: what the workers call. If it cannot be pickled for them, this process calls it.
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    number = min(cores, rows // ROWS_PER_WORKER, MOST_WORKERS)
    return number if number > 1 and can_be_sent(function) else 1


def can_be_sent(function: Callable[[range], Any]) -> bool:
    """Whether a function can be pickled for another process, which finds code by module and name.

    Functions inside functions, and what was typed into a notebook, cannot be found.
    """
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return hasattr(sys.modules["__main__"], "__file__")


def map_in_order(
    function: Callable[[range], Any], spans: list[range], processes: int
) -> Generator[Any, None, None]:
    """Yields `function(span)` of every span of rows, in their order.

    `datasets.map(num_proc=)` is no substitute: it forks a process that has threads, reports the
    error of a row only after all other rows, replaces Ctrl-C by an error of its own, and leaves its
    processes behind if this one is killed.

    Args:
        function: for several processes one that `can_be_sent`.
        processes: 1 calls the function here.

    Raises:
        BrokenProcessPool: a process died, such as for lack of memory.
        BaseException: what the function raises, that of the first span that raises.
    """
    if processes == 1:
        yield from map(function, spans)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, start_worker, (function,)) as executor:
        # It submits all spans at once, and cancels the rest on an error or when it is closed.
        yield from executor.map(run_task, spans)


# ============================================================ within a worker
def start_worker(function: Callable[[range], Any]) -> None:
    """Prepares a worker, which then calls this function for one span after another."""
    global task
    task = function
    # Ctrl-C reaches the workers, too. Their parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The tokenizer's own threads would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Ends this worker when its parent has died without warning, such as by SIGKILL."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_task(span: range) -> Any:
    """Calls the worker's function."""
    return task(span)
