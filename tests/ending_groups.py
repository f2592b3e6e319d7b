"""Ends many process groups on CPUs as a run under DDP ends its own, the last collective just over.

python tests/ending_groups.py PORT RANK
"""

import os
import sys
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from common.log import Logger


def main(port: str, rank: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"ACCELERATE_USE_CPU": "true"}
    for number in range(40):
        os.environ["MASTER_PORT"] = str(int(port) + number)
        logger = object.__new__(Logger)
        logger.accelerator = Accelerator(cpu=True)
        logger.bar = SimpleNamespace(close=lambda: None)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        found = [torch.zeros(1) for _ in range(2)]
        distributed.all_gather(found, torch.ones(1))
        del found
        distributed.barrier()
        logger.close()
        del model  # as the frame of a recipe's `main` goes
        AcceleratorState._reset_state()
        PartialState._reset_state()
    print("ended", flush=True)


main(*sys.argv[1:])
