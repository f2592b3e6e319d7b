"""Estimates the memory that a model's states take under a launch config, without its weights.

    python -m common.memory --model assets/model --config accelerate_configs/ds_zero3.yaml \\
        --num_processes 8 [--trained 2] [--frozen 2] [--lora_r 16 [--load_in_4bit]]

The model is built from its config alone: that of a folder or of a hub name. The table gives each
state in bytes per parameter and in GiB, for each process, at three moments: `forward`, at its end,
when activations are at their largest; `backward`, at the end of the last micro-batch's; `step`,
inside the optimizer. What the formulas rest on, and how far they were from what was measured:
docs/memory.md.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common import REPOSITORY, hub, in_one_line, show_any_text
from common.models import load, lora, prepare
from common.models.logprobs import LogProbModel
from common.zero import read_json

GIB = 2**30
# A weight of 4 bits, and its part of the scales: one byte for 64 weights, 4 for 256 of such bytes.
PACKED_SIZE = 0.5 + 1 / 64 + 4 / (64 * 256)
FORWARD = "forward"
BACKWARD = "backward"
STEP = "step"
MOMENTS = (FORWARD, BACKWARD, STEP)
OMITTED = """\
Not in the estimate: activations, the cache of generation, further layers that are gathered or in
flight, the optimizer's temporary buffers, the CUDA context (about 0.5 GiB) and fragmentation.
docs/memory.md has a formula for activations."""


class Setup(NamedTuple):
    """The settings of a launch config that decide the memory. Sizes are in elements.

    Attributes:
        kind: `plain` (one process), `ddp`, `fsdp2` or `zero`.
        precision: `fp16`, `bf16` or `no`.
        stage: of ZeRO.
        bucket: what DeepSpeed reduces at once. -1 stands for accelerate's `auto`, the square of the
            hidden size.
        buckets: how many of them there are.
        live: what ZeRO-3 holds gathered at most.
        sub_group: what ZeRO-3 updates at once.
        accumulates: several micro-batches make an update, so the gradients of earlier ones are held
            during the next forward.
    """

    kind: str
    precision: str
    processes: int
    stage: int = 0
    bucket: int = 0
    buckets: int = 1
    live: int = 0
    sub_group: int = 0
    optimizer_on_cpu: bool = False
    weights_on_cpu: bool = False
    accumulates: bool = True

    @property
    def is_half(self) -> bool:
        return self.precision != "no"

    @property
    def place_of_optimizer(self) -> str:
        return "CPU" if self.optimizer_on_cpu else "GPU"

    @property
    def place_of_weights(self) -> str:
        return "CPU" if self.weights_on_cpu else "GPU"

    @property
    def while_adding(self) -> tuple[str, ...]:
        """The moments at which the gradients of earlier micro-batches wait for the next ones."""
        return (FORWARD,) if self.accumulates else ()


class State(NamedTuple):
    """A state of a model, such as its gradients.

    Attributes:
        size: bytes of an element.
        split: whether each process holds a part of it only.
        moments: when it is there.
        place: `GPU` or `CPU`.
        limit: elements that it has at most. None: no limit.
        fixed: elements that it has whatever the model. None: grows with the parameters.
        of_base: it is of the frozen weights below adapters, too.
    """

    name: str
    size: float
    split: bool
    moments: tuple[str, ...] = MOMENTS
    place: str = "GPU"
    limit: int | None = None
    fixed: int | None = None
    of_base: bool = False

    def formula(self, models: int = 1) -> str:
        """Returns the bytes per parameter, such as `8 / N`, or `2 x 8 / N` for two models."""
        if self.fixed is not None:
            return "fixed"
        times = f"{models} x " if models != 1 else ""
        return f"{times}{self.size:.3g}{' / N' if self.split else ''}"

    def bytes(self, parameters: int, processes: int) -> float:
        """Returns the bytes that one process holds."""
        if self.fixed is not None:
            elements: float = self.fixed
        elif self.split:
            elements = parameters / processes
        else:
            elements = parameters
        if self.limit is not None:
            elements = min(elements, self.limit)
        return self.size * elements


class Row(NamedTuple):
    """A line of the table: a state, or the sum of all in one place. Bytes of one process."""

    place: str
    state: str
    formula: str
    forward: float
    backward: float
    step: float


# ============================================================ the launch config


def read_setup(path: Path, processes: int | None = None) -> Setup:
    """Reads an accelerate YAML and the DeepSpeed JSON that it names.

    Args:
        path: relative to the current directory or else to this repository.
        processes: by default those of the YAML.

    Raises:
        SystemExit: a file is missing or no such config, or its settings are not estimated here.
    """
    config = read_yaml(path)
    kind = config["distributed_type"]
    processes = processes or int(config.get("num_processes", 1))
    if processes < 1:
        sys.exit(f"--num_processes {processes}: expected at least 1")
    if kind == "DEEPSPEED":
        name = config.get("deepspeed_config", {}).get("deepspeed_config_file")
        if not name:
            sys.exit(
                f"{path} names no deepspeed_config_file: only configs with a DeepSpeed JSON can be "
                "estimated"
            )
        return read_deepspeed(name, processes)

    precision = str(config.get("mixed_precision", "no"))
    if kind == "FSDP":
        fsdp = config.get("fsdp_config", {})
        version = int(fsdp.get("fsdp_version", 1))
        if version != 2 or fsdp.get("fsdp_reshard_after_forward") is not True:
            sys.exit(
                f"{path}: only fsdp_version 2 with fsdp_reshard_after_forward true can be estimated"
            )
        on_cpu = fsdp.get("fsdp_offload_params") is True
        return Setup("fsdp2", precision, processes, optimizer_on_cpu=on_cpu, weights_on_cpu=on_cpu)
    if kind == "NO":
        return Setup("plain", precision, processes)
    # Where the YAML speaks of several GPUs accelerate makes DDP, also with one process.
    return Setup("ddp", precision, processes)


def read_yaml(path: Path) -> dict:
    """Reads an accelerate YAML; see `read_setup`."""
    found = [file for file in (path, REPOSITORY / path) if file.is_file()]
    if not found:
        sys.exit(f"the config {str(path)!r} was found neither in {Path.cwd()} nor in {REPOSITORY}")
    try:
        config = yaml.safe_load(found[0].read_text(encoding="utf-8"))
        config["distributed_type"]
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        sys.exit(f"{path} is no accelerate config: it has no distributed_type")
    return config


def read_deepspeed(name: str, processes: int) -> Setup:
    """Reads a DeepSpeed JSON. What it does not say has DeepSpeed 0.19.8's default.

    Raises:
        SystemExit: as `read_setup`.
    """
    config = read_json(name)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage")
    if stage not in (1, 2, 3) or "data_types" in config:
        sys.exit(f"{name}: only ZeRO stages 1, 2 and 3 without data_types can be estimated")
    places = {
        what: zero.get(f"offload_{what}", {}).get("device", "none")
        for what in ("optimizer", "param")
    }
    if not set(places.values()) <= {"none", "cpu"}:
        sys.exit(f"{name}: only offloading to the CPU can be estimated, not to {places}")

    halves = [half for half in ("fp16", "bf16") if config.get(half, {}).get("enabled") is True]

    def elements(key: str, default: float) -> int:
        value = zero.get(key, "auto")
        return int(float(default if value == "auto" else value))

    bucket = elements("reduce_bucket_size", 5e8)
    if zero.get("reduce_bucket_size") == "auto":
        bucket = -1  # accelerate fills it in
    return Setup(
        "zero",
        halves[0] if halves else "no",
        processes,
        stage,
        bucket,
        buckets=2 if zero.get("overlap_comm") is True and stage < 3 else 1,
        live=elements("stage3_max_live_parameters", 1e9),
        sub_group=elements("sub_group_size", 1e9),
        optimizer_on_cpu=places["optimizer"] == "cpu",
        weights_on_cpu=places["param"] == "cpu" and stage == 3,
    )


# ============================================================ the states


def states(setup: Setup, unit: int) -> tuple[list[State], State]:
    """Returns the states of one trained model, with AdamW, and that of a frozen one.

    Args:
        unit: parameters of the largest layer or embedding, which FSDP2 gathers at once.
    """
    if setup.kind == "zero":
        return zero_states(setup)
    if setup.kind == "fsdp2":
        return fsdp2_states(setup, unit)
    return ddp_states(setup)


def ddp_states(setup: Setup) -> tuple[list[State], State]:
    """Returns what `states` does, under DDP or in a single process."""
    trained = [
        State("weights", 4, split=False),
        State("gradients", 4, split=False, moments=(*setup.while_adding, BACKWARD, STEP)),
        State("Adam", 8, split=False),
    ]
    if setup.kind == "ddp":
        # DDP reduces copies of the gradients, and keeps them.
        trained += [State("DDP's buckets", 4, split=False)]
    if setup.is_half:
        trained += [
            State(
                "half copies (autocast), at most",
                2,
                split=False,
                moments=(FORWARD,),
                of_base=True,
            ),
        ]
    return trained, State("weights", 4, split=False)


def fsdp2_states(setup: Setup, unit: int) -> tuple[list[State], State]:
    """Returns what `states` does, under FSDP2."""
    weights = State("weights", 4, split=True, place=setup.place_of_weights)
    trained = [
        weights,
        # FSDP2 reduces gradients after the last micro-batch only. Before, they add up whole on
        # every GPU.
        State("gradients that add up", 4, split=False, moments=setup.while_adding),
        State(
            "gradients",
            4,
            split=True,
            moments=(BACKWARD, STEP),
            place=setup.place_of_optimizer,
        ),
        State("Adam", 8, split=True, place=setup.place_of_optimizer),
        State(
            "gathered, one layer",
            2 if setup.is_half else 4,
            split=False,
            moments=(FORWARD,),
            fixed=unit,
        ),
    ]
    # It rounds all weights when it gathers them, so frozen ones are held rounded.
    return trained, weights._replace(size=2 if setup.is_half else 4)


def zero_states(setup: Setup) -> tuple[list[State], State]:
    """Returns what `states` does, under DeepSpeed."""
    size = 2 if setup.is_half else 4
    weights = State("weights", size, split=setup.stage == 3, place=setup.place_of_weights)
    if setup.stage == 3:
        gradients = zero3_gradients(setup, size)
    elif setup.optimizer_on_cpu:
        gradients = offloaded_gradients(setup, size)
    else:
        gradients = zero1_or_2_gradients(setup, size)
    moments_of_buffer = {
        1: (*setup.while_adding, BACKWARD),
        2: (BACKWARD,),
        3: MOMENTS,
    }
    trained = [
        weights,
        State("fp32 masters", 4, split=True, place=setup.place_of_optimizer),
        State("Adam", 8, split=True, place=setup.place_of_optimizer),
        *gradients,
        State(
            "reduction buffer",
            size,
            split=False,
            moments=moments_of_buffer[setup.stage],
            fixed=setup.bucket * setup.buckets,
        ),
    ]
    return trained, weights


def zero3_gradients(setup: Setup, size: int) -> list[State]:
    """Returns the gradients under ZeRO-3, and the weights that it keeps gathered.

    Args:
        size: bytes per element.
    """
    # From the start of the step the fp32 copies of one group of parameters are there beside the
    # gradients.
    copies = State("fp32 gradients", 4, split=True, moments=(STEP,), limit=setup.sub_group)
    if setup.optimizer_on_cpu:
        copies = State("fp32 gradients", 4, split=True, place="CPU")
    result = [State("gradients", size, split=True), copies]
    if setup.processes > 1:
        result += [
            State(
                "gathered, at most",
                size,
                split=False,
                moments=(FORWARD,),
                limit=setup.live,
                of_base=True,
            )
        ]
    return result


def offloaded_gradients(setup: Setup, size: int) -> list[State]:
    """Returns the gradients under ZeRO-1 and 2 where Adam runs on the CPU.

    Args:
        size: bytes per element.
    """
    if setup.stage == 1:
        adding = State("gradients", size, split=False, moments=setup.while_adding)
    else:
        adding = State(
            "gradients that add up",
            size,
            split=True,
            moments=MOMENTS if setup.accumulates else (),
            place="CPU",
        )
    return [
        adding,
        State("fp32 gradients", 4, split=True, place="CPU"),
        State("half copy", size, split=True, place="CPU"),
    ]


def zero1_or_2_gradients(setup: Setup, size: int) -> list[State]:
    """Returns the gradients under ZeRO-1 and 2 where Adam runs on the GPU.

    Args:
        size: bytes per element.
    """
    if setup.stage == 1:
        # Whole gradients add up, and are split at the end.
        halves = [
            State("gradients", size, split=False, moments=setup.while_adding),
            State("gradients", size, split=True, moments=(BACKWARD, STEP)),
        ]
    else:
        # Parts of gradients add up. Beside them is the part of the micro-batch that just ran.
        halves = [
            State("gradients", size, split=True, moments=(*setup.while_adding, BACKWARD, STEP)),
            State(
                "gradients of this micro-batch",
                size,
                split=True,
                moments=(BACKWARD,) if setup.accumulates else (),
            ),
        ]
    return [*halves, State("fp32 gradients", 4, split=True, moments=(STEP,))]


# ============================================================ the model


def count_parameters(name: str) -> tuple[int, int, int]:
    """Counts a causal language model without reading its weights.

    Returns:
        Its parameters (tied ones once), those of its largest layer or embedding, and the bytes of
        its buffers.

    Raises:
        SystemExit: there is no model of that name, or transformers does not know its architecture.
    """
    model = build(name)
    names_of_layers = model._no_split_modules or []
    units = [module for module in model.modules() if type(module).__name__ in names_of_layers]
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embedding is not None:
            units.append(embedding)
    largest = max(count(unit.parameters()) for unit in units)
    buffer_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    return count(model.parameters()), largest, buffer_bytes


def build(name: str) -> PreTrainedModel:
    """Builds a causal language model without weights; see `count_parameters`."""
    if not Path(name).exists():
        hub.reach()
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # whatever transformers and the hub raise
        load.refuse_own_code(name, error)
        reason = in_one_line(error)
        sys.exit(f"no causal language model could be built from the config of {name!r}: {reason}")


def count_adapter(name: str, rank: int) -> tuple[int, int]:
    """Counts the adapter on all linear layers, and what `--load_in_4bit` would pack.

    Returns:
        The parameters of the adapter; those of all linear layers but the output layer.
    """
    model = build(name)
    sizes = 0
    for layer in lora.layers_to_adapt(model, [lora.ALL_LINEAR]):
        sizes += sum(model.get_submodule(layer).weight.shape)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    return rank * sizes, sum(layer.weight.numel() for layer in linear)


def count_rounded(name: str, device_type: str = "cuda") -> int:
    """Counts the parameters that a frozen model holds in half precision where autocast is used.

    Args:
        device_type: see `prepare.rounded_by_autocast`.
    """
    wrapper = LogProbModel(build(name))
    rounded = prepare.rounded_by_autocast(wrapper, device_type)
    return count(wrapper.get_parameter(path) for path in rounded)


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Counts the numbers that the parameters hold."""
    return sum(p.numel() for p in parameters)


# ============================================================ the table


def table(
    setup: Setup,
    parameters: int,
    unit: int = 0,
    trained: int = 1,
    frozen: int = 0,
    adapter: int = 0,
    packed: int = 0,
    rounded: int = 0,
) -> list[Row]:
    """Returns what one process holds: the states on its GPU and their sum, then those on its CPU.

    The trained models are parts of one engine, as in all recipes, so buffers of fixed size are
    counted once.

    Args:
        parameters: of one model.
        unit: see `states`.
        trained: number of trained models.
        frozen: number of frozen models.
        adapter: parameters of the adapter of each trained model, whose own weights are frozen then.
            0: there is none.
        packed: of the frozen weights below an adapter, those of 4 bits.
        rounded: see `count_rounded`. Where there is no autocast this means nothing.
    """
    trained_states, frozen_state = states(setup, unit)
    if setup.kind not in ("plain", "ddp") or not setup.is_half:
        rounded = 0
    rounded_of_base = 0 if packed else rounded  # a model of 4 bits has its other weights in fp32
    # The number of models, a state of each, and how many parameters of each have it.
    entries = []
    if adapter:
        base = frozen_state._replace(name="weights of the base")
        entries += frozen_entries(trained, base, parameters - packed, rounded_of_base)
    if packed:
        in_4bit = frozen_state._replace(name="weights of the base, 4 bits", size=PACKED_SIZE)
        entries.append((trained, in_4bit, packed))
    for state in trained_states:
        elements = adapter or parameters
        if adapter and state.of_base:
            elements += parameters - packed - rounded_of_base
        if adapter and state.name == "weights":
            state = state._replace(name="weights of the adapters")
        entries.append((trained, state, elements))
    if frozen:
        state = frozen_state._replace(name="frozen weights")
        entries += frozen_entries(frozen, state, parameters, rounded)
    rows = []
    for place in ("GPU", "CPU"):
        here = []
        for models, state, elements in entries:
            if state.place == place and state.moments:
                size = state.bytes(models * elements, setup.processes)
                sizes = [size if moment in state.moments else 0 for moment in MOMENTS]
                here.append(Row(place, state.name, state.formula(models), *sizes))
        if here:
            sums = [sum(sizes) for sizes in zip(*(row[3:] for row in here))]
            rows += [*here, Row(place, "sum", "", *sums)]
    return rows


def frozen_entries(
    models: int, state: State, elements: int, rounded: int
) -> list[tuple[int, State, int]]:
    """Returns the entries of frozen weights in `table`, with those that are rounded apart."""
    if not rounded:
        return [(models, state, elements)]
    half = state._replace(name=f"{state.name}, half", size=2)
    return [(models, state, elements - rounded), (models, half, rounded)]


def print_table(rows: list[Row]) -> None:
    moments = " ".join(f"{moment:>9}" for moment in MOMENTS)
    print(f"{'for each process':40} {'bytes/parameter':>15} {moments}  GiB")
    for place, name, formula, *sizes in rows:
        in_gib = " ".join(f"{size / GIB:9.3f}" for size in sizes)
        print(f"{place} {name:36} {formula:>15} {in_gib}")


def read_arguments() -> argparse.Namespace:
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m common.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        help="Hugging Face folder or hub name; only its config is read",
    )
    parser.add_argument("--config", required=True, type=Path, help="accelerate YAML")
    parser.add_argument("--num_processes", type=int, help="default: the YAML's")
    parser.add_argument(
        "--trained", type=int, default=1, help="models of this size that are trained; default: 1"
    )
    parser.add_argument(
        "--frozen", type=int, default=0, help="models of this size that are only read; default: 0"
    )
    parser.add_argument(
        "--lora_r",
        type=int,
        default=0,
        help="rank of adapters on all linear layers of the trained models; 0: none",
    )
    parser.add_argument(
        "--load_in_4bit",
        action="store_true",
        help="the linear layers below the adapters are packed",
    )
    parser.add_argument(
        "--accumulation_steps",
        type=int,
        default=2,
        help="1: no gradients are held during the forward pass; "
        "all larger numbers give the same estimate",
    )
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    setup = read_setup(args.config, args.num_processes)
    setup = setup._replace(accumulates=args.accumulation_steps > 1)
    parameters, unit, buffer_bytes = count_parameters(args.model)
    if setup.bucket == -1:
        setup = setup._replace(bucket=build(args.model).config.hidden_size ** 2)

    adapter = packed = rounded = 0
    if args.lora_r > 0:
        adapter, packed = count_adapter(args.model, args.lora_r)
    if not args.load_in_4bit:
        packed = 0
    elif not adapter or setup.kind not in ("plain", "ddp"):
        sys.exit("--load_in_4bit: expected --lora_r, and a config of one process or DDP")
    if setup.is_half and setup.kind in ("plain", "ddp") and (adapter or args.frozen):
        rounded = count_rounded(args.model)
    names = {
        "plain": "one process",
        "ddp": "DDP",
        "fsdp2": "FSDP2",
        "zero": f"DeepSpeed ZeRO-{setup.stage}",
    }
    precision = setup.precision if setup.is_half else "fp32"
    print(
        f"{args.model}: {parameters:,} parameters, tied ones once; "
        f"buffers {buffer_bytes / GIB:.2f} GiB"
    )
    print(
        f"{names[setup.kind]} {precision}, N = {setup.processes}, "
        f"{args.trained} trained, {args.frozen} frozen"
    )
    if adapter:
        print(f"adapters of rank {args.lora_r}: {adapter:,} parameters for each trained model")
    print()
    print_table(table(setup, parameters, unit, args.trained, args.frozen, adapter, packed, rounded))
    print(f"\n{OMITTED}")


if __name__ == "__main__":
    main()
