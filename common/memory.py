"""How much memory a model's states take under a launch config: an estimate to choose a config by, before anything is downloaded.

    python -m common.memory --model assets/model --config accelerate_configs/ds_zero3.yaml --num_processes 8 [--trained 2] [--frozen 2]

The model is built without weights, from its config alone: a folder's or a hub name's. The table gives each state in bytes per parameter and
in GiB, on each GPU, at three moments: `forward`, at its end, when activations are at their largest; `backward`, as the last micro-batch's
ends; `step`, inside the optimizer. What the formulas rest on, and how far they were from what was measured: docs/memory.md.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from common.zero import read_json

from . import REPOSITORY

GIB = 2**30
MOMENTS = {"f": "forward", "b": "backward", "s": "step"}
OMITTED = """Not in the estimate: activations, the cache of generation, further layers that are gathered or in flight, the optimizer's temporary
buffers, the CUDA context (about 0.5 GiB) and fragmentation. docs/memory.md has a formula for activations."""


class Setup(NamedTuple):
    """What of a launch config decides on memory; sizes are in elements."""

    kind: str  # "plain" (one process), "ddp", "fsdp2" or "zero"
    precision: str  # "fp16", "bf16" or "no"
    processes: int
    stage: int = 0
    bucket: int = 0  # what DeepSpeed reduces at once; -1 is accelerate's "auto", the square of the hidden size
    buckets: int = 1
    live: int = 0  # what ZeRO-3 holds gathered at most
    sub_group: int = 0  # what ZeRO-3 updates at once
    optimizer_on_cpu: bool = False
    weights_on_cpu: bool = False
    accumulates: bool = (
        True  # several micro-batches make an update, so gradients stand there while they run
    )


class State(NamedTuple):
    """One row: `size` bytes for each parameter, over N if `split`, at the moments `when`; of at most `limit` parameters, or of `fixed`."""

    name: str
    size: int
    split: bool
    when: str = "fbs"
    where: str = "GPU"
    limit: int | None = None
    fixed: int | None = None

    def formula(self) -> str:
        """Bytes per parameter, such as `8 / N`."""
        return "fixed" if self.fixed is not None else f"{self.size}{' / N' if self.split else ''}"

    def bytes(self, parameters: int, processes: int) -> float:
        """What one process holds."""
        elements = (
            parameters / (processes if self.split else 1) if self.fixed is None else self.fixed
        )
        return self.size * (elements if self.limit is None else min(elements, self.limit))


def read_setup(path: Path, processes: int | None = None) -> Setup:
    """Reads an accelerate YAML, and the DeepSpeed JSON it names, relative to the current directory or else to this repository.

    Raises:
        SystemExit: a file that is missing or no such config, settings whose memory is not known here.
    """
    found = [file for file in (path, REPOSITORY / path) if file.is_file()]
    if not found:
        sys.exit(f"the config {str(path)!r} was found neither in {Path.cwd()} nor in {REPOSITORY}")
    try:
        config = yaml.safe_load(found[0].read_text(encoding="utf-8"))
        kind = config["distributed_type"]
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        sys.exit(f"{path} is no accelerate config: it has no distributed_type")
    processes = processes or int(config.get("num_processes", 1))
    if processes < 1:
        sys.exit(f"--num_processes {processes}: expected at least 1")
    if kind == "FSDP":
        fsdp = config.get("fsdp_config", {})
        if (
            int(fsdp.get("fsdp_version", 1)) != 2
            or fsdp.get("fsdp_reshard_after_forward") is not True
        ):
            sys.exit(
                f"{path}: estimated are fsdp_version 2 and fsdp_reshard_after_forward true only"
            )
        on_cpu = fsdp.get("fsdp_offload_params") is True
        return Setup(
            "fsdp2",
            str(config.get("mixed_precision", "no")),
            processes,
            optimizer_on_cpu=on_cpu,
            weights_on_cpu=on_cpu,
        )
    if kind != "DEEPSPEED":
        # What the YAML calls several GPUs becomes DDP, also with one process.
        return Setup(
            "plain" if kind == "NO" else "ddp", str(config.get("mixed_precision", "no")), processes
        )
    name = config.get("deepspeed_config", {}).get("deepspeed_config_file")
    if not name:
        sys.exit(
            f"{path} names no deepspeed_config_file: estimated are configs with a DeepSpeed JSON only"
        )
    return read_deepspeed(name, processes)


def read_deepspeed(name: str, processes: int) -> Setup:
    """The setup of a DeepSpeed JSON; what is not said there has DeepSpeed 0.19.8's default.

    Raises:
        SystemExit: see `read_setup`.
    """
    config = read_json(name)
    zero, halves = (
        config.get("zero_optimization", {}),
        [half for half in ("fp16", "bf16") if config.get(half, {}).get("enabled") is True],
    )
    if zero.get("stage") not in (1, 2, 3) or "data_types" in config:
        sys.exit(f"{name}: estimated are ZeRO stages 1, 2 and 3 without data_types")
    on_cpu = {
        what: zero.get(f"offload_{what}", {}).get("device", "none")
        for what in ("optimizer", "param")
    }
    if not set(on_cpu.values()) <= {"none", "cpu"}:
        sys.exit(f"{name}: offloading to {on_cpu} is not estimated, to the CPU it is")
    size = lambda key, default: int(
        float(default if zero.get(key, "auto") == "auto" else zero[key])
    )
    bucket = -1 if zero.get("reduce_bucket_size") == "auto" else size("reduce_bucket_size", 5e8)
    return Setup(
        "zero",
        halves[0] if halves else "no",
        processes,
        zero["stage"],
        bucket,
        2 if zero.get("overlap_comm") is True and zero["stage"] < 3 else 1,
        size("stage3_max_live_parameters", 1e9),
        size("sub_group_size", 1e9),
        on_cpu["optimizer"] == "cpu",
        on_cpu["param"] == "cpu" and zero["stage"] == 3,
    )


def states(setup: Setup, unit: int) -> tuple[list[State], State]:
    """The states of one trained model, with AdamW, and that of a frozen one.

    Args:
        unit: parameters of the largest layer or embedding, which FSDP2 gathers at once.
    """
    many, half = setup.processes > 1, setup.precision != "no"
    adding = "f" if setup.accumulates else ""
    if setup.kind in ("plain", "ddp"):
        trained = [
            State("weights", 4, False),
            State("gradients", 4, False, adding + "bs"),
            State("Adam", 8, False),
        ]
        trained += (
            [State("DDP's buckets", 4, False)] if setup.kind == "ddp" else []
        )  # DDP reduces copies of the gradients, and keeps them
        trained += [State("half copies (autocast), at most", 2, False, "f")] if half else []
        return trained, State("weights", 4, False)
    optimizer, weights = (
        "CPU" if there else "GPU" for there in (setup.optimizer_on_cpu, setup.weights_on_cpu)
    )
    if setup.kind == "fsdp2":
        # Without synchronisation, before the last micro-batch, gradients add up whole on every GPU.
        trained = [
            State("weights", 4, True, where=weights),
            State("gradients that add up", 4, False, adding),
        ]
        trained += [
            State("gradients", 4, True, "bs", optimizer),
            State("Adam", 8, True, where=optimizer),
        ]
        return [
            *trained,
            State("gathered, one layer", 2 if half else 4, False, "f", fixed=unit),
        ], State("weights", 4, True, where=weights)
    size, three = 2 if half else 4, setup.stage == 3
    trained = [
        State("weights", size, three, where=weights),
        State("fp32 masters", 4, True, where=optimizer),
    ]
    trained += [State("Adam", 8, True, where=optimizer)]
    bucket = State(
        "reduction buffer",
        size,
        False,
        {1: adding + "b", 2: "b", 3: "fbs"}[setup.stage],
        fixed=setup.bucket * setup.buckets,
    )
    if three:
        # From the start of the step the fp32 copies of one group of parameters stand beside the gradients.
        copies = State("fp32 gradients", 4, True, "s", limit=setup.sub_group)
        if setup.optimizer_on_cpu:
            copies = State("fp32 gradients", 4, True, where="CPU")
        trained += [State("gradients", size, True), copies]
        trained += [State("gathered, at most", size, False, "f", limit=setup.live)] if many else []
    elif setup.optimizer_on_cpu:
        summed = (
            State("gradients", size, False, adding)
            if setup.stage == 1
            else State("gradients that add up", size, True, adding and "fbs", "CPU")
        )
        trained += [
            summed,
            State("fp32 gradients", 4, True, where="CPU"),
            State("half copy", size, True, where="CPU"),
        ]
    elif setup.stage == 1:  # whole gradients add up, and are split at the end
        trained += [
            State("gradients", size, False, adding),
            State("gradients", size, True, "bs"),
            State("fp32 gradients", 4, True, "s"),
        ]
    else:  # parts of gradients add up, and that of the micro-batch stands beside them
        trained += [
            State("gradients", size, True, adding + "bs"),
            State("gradients of this micro-batch", size, True, adding and "b"),
        ]
        trained += [State("fp32 gradients", 4, True, "s")]
    return [*trained, bucket], State("weights", size, three, where=weights)


def count_parameters(name: str) -> tuple[int, int, int]:
    """Parameters (tied ones once), those of the largest layer or embedding, and bytes of buffers, of a causal language model.

    Raises:
        SystemExit: nothing there, or an architecture that transformers does not know.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(name), dtype=torch.float32
            )
    except Exception as error:  # whatever transformers and the hub raise
        sys.exit(
            f"no causal language model could be built from the config of {name!r}: {str(error).strip().splitlines()[0]}"
        )
    count = lambda module: sum(p.numel() for p in module.parameters())
    units = [
        module
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or [])
    ]
    units += [model.get_input_embeddings(), model.get_output_embeddings()]
    return (
        count(model),
        max(count(unit) for unit in units if unit is not None),
        sum(b.numel() * b.element_size() for b in model.buffers()),
    )


def table(
    setup: Setup, parameters: int, unit: int = 0, trained: int = 1, frozen: int = 0
) -> list[tuple]:
    """Rows `(where, state, formula, bytes in the forward, backward, step)` per process, and a sum for each place.

    The trained models are parts of one engine, as everywhere here, so what does not grow with the parameters is there once.
    """
    own, other = states(setup, unit)
    rows = [(trained, state) for state in own] + (
        [(frozen, other._replace(name="frozen weights"))] if frozen else []
    )
    result = []
    for where in ("GPU", "CPU"):
        here = [
            (
                where,
                state.name,
                state.formula()
                if times == 1 or state.fixed is not None
                else f"{times} x {state.formula()}",
                *(
                    state.bytes(times * parameters, setup.processes) * (moment in state.when)
                    for moment in MOMENTS
                ),
            )
            for times, state in rows
            if state.where == where and state.when
        ]
        result += (
            [*here, (where, "sum", "", *map(sum, zip(*(row[3:] for row in here))))] if here else []
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder or hub name; only its config is read"
    )
    parser.add_argument("--config", required=True, type=Path, help="accelerate YAML")
    parser.add_argument("--num_processes", type=int, help="default: the YAML's")
    parser.add_argument(
        "--trained", type=int, default=1, help="models of this size that are trained"
    )
    parser.add_argument(
        "--frozen", type=int, default=0, help="models of this size that are only read"
    )
    parser.add_argument(
        "--accumulation_steps",
        type=int,
        default=2,
        help="1: no gradients stand there in the forward; any other number is alike",
    )
    args = parser.parse_args()
    setup = read_setup(args.config, args.num_processes)._replace(
        accumulates=args.accumulation_steps > 1
    )
    parameters, unit, buffers = count_parameters(args.model)
    if setup.bucket < 0:
        setup = setup._replace(bucket=AutoConfig.from_pretrained(args.model).hidden_size ** 2)
    kind = {
        "plain": "one process",
        "ddp": "DDP",
        "fsdp2": "FSDP2",
        "zero": f"DeepSpeed ZeRO-{setup.stage}",
    }[setup.kind]
    print(
        f"{args.model}: {parameters:,} parameters, tied ones once; buffers {buffers / GIB:.2f} GiB"
    )
    print(
        f"{kind} {'fp32' if setup.precision == 'no' else setup.precision}, N = {setup.processes}, {args.trained} trained, {args.frozen} frozen\n"
    )
    print(
        f"{'for each process':40} {'bytes/parameter':>15} {'forward':>9} {'backward':>9} {'step':>9}  GiB"
    )
    for where, name, formula, *sizes in table(setup, parameters, unit, args.trained, args.frozen):
        print(
            f"{where} {name:36} {formula:>15} " + " ".join(f"{size / GIB:9.3f}" for size in sizes)
        )
    print(f"\n{OMITTED}")


if __name__ == "__main__":
    main()
