"""Estimates the memory that training takes under a launch config, without a model's weights.

    python -m preference_recipes.tools.memory \\
        --model assets/model --config accelerate_configs/ds_zero3.yaml \\
        --num_processes 8 [--trained 2] [--frozen 2] [--lora_r 16 [--load_in_4bit]] \\
        [--micro_train_tokens N] [--gradient_checkpointing]

The model is built from its config alone: that of a folder or of a hub name. The table gives each
state in GiB, for each process, at three moments: `forward`, at its end, when activations are at
their largest; `backward`, at the end of the last micro-batch's; `step`, inside the optimizer. The
formulas in bytes per parameter, what they rest on, and how far they were from what was measured:
docs/memory.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common import FILES, in_one_line, show_any_text
from common.zero import read_json
from preference_recipes.models import load, lora, rounding
from preference_recipes.models.logprobs import CHUNK_ELEMENTS, LogProbModel

GIB = 2**30
# A weight of 4 bits, and its part of the scales: one byte for 64 weights, 4 for 256 of such bytes.
PACKED_SIZE = 0.5 + 1 / 64 + 4 / (64 * 256)
# By their first letters states say when they are there.
MOMENTS = ("forward", "backward", "step")
OMITTED = """\
Activations and logits are estimates, see docs/memory.md. Not in the table: masks of packed rows,
the cache of generation, further layers that are gathered or in flight, the optimizer's temporary
buffers, the CUDA context (about 0.5 GiB) and fragmentation."""


class Setup(NamedTuple):
    """The settings of a launch config that decide the memory. Sizes are in elements.

    Attributes:
        kind: `plain` (one process), `ddp`, `fsdp2` or `zero`.
        precision: `fp16`, `bf16` or `no`.
        stage: of ZeRO.
        bucket: what DeepSpeed reduces at once. None stands for accelerate's `auto`, the square of
            the hidden size.
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
    bucket: int | None = 0
    buckets: int = 1
    live: int = 0
    sub_group: int = 0
    optimizer_on_cpu: bool = False
    weights_on_cpu: bool = False
    accumulates: bool = True

    @property
    def size(self) -> int:
        """Bytes of a number in the precision of the run."""
        return 4 if self.precision == "no" else 2

    @property
    def has_autocast(self) -> bool:
        """Whether weights are held in fp32, and rounded in each use."""
        return self.kind in ("plain", "ddp") and self.precision != "no"

    @property
    def place_of_optimizer(self) -> str:
        return "CPU" if self.optimizer_on_cpu else "GPU"

    @property
    def place_of_weights(self) -> str:
        return "CPU" if self.weights_on_cpu else "GPU"

    @property
    def while_adding(self) -> str:
        """The moments at which the gradients of earlier micro-batches wait for the next ones."""
        return "f" if self.accumulates else ""

    @property
    def name(self) -> str:
        """What the launch is called, such as `DeepSpeed ZeRO-3 bf16`."""
        names = {"plain": "one process", "ddp": "DDP", "fsdp2": "FSDP2"}
        engine = names.get(self.kind, f"DeepSpeed ZeRO-{self.stage}")
        return f"{engine} {self.precision.replace('no', 'fp32')}"


class Counts(NamedTuple):
    """How many numbers a model holds.

    Attributes:
        parameters: tied ones once.
        unit: of its largest layer or embedding, which FSDP2 gathers at once.
        hidden: its hidden size.
        adapter: of an adapter on all linear layers, below which the model is frozen; 0: none.
        packed: of the frozen weights below an adapter, those of 4 bits.
        rounded: weights that a frozen model holds in half precision where there is autocast.
    """

    parameters: int
    unit: int = 0
    hidden: int = 0
    adapter: int = 0
    packed: int = 0
    rounded: int = 0


class State(NamedTuple):
    """A state of the models, such as their gradients.

    Attributes:
        bytes: of one process.
        moments: when it is there: the first letters of some of `MOMENTS`.
        place: `GPU` or `CPU`.
    """

    name: str
    bytes: float
    moments: str = "fbs"
    place: str = "GPU"


class Row(NamedTuple):
    """A line of the table: a state, or the sum of all in one place. Bytes of one process."""

    place: str
    state: str
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
    found = [file for file in (path, FILES / path) if file.is_file()]
    if not found:
        sys.exit(f"the config {str(path)!r} was found neither in {Path.cwd()} nor in {FILES}")
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

    accelerate_fills_in = zero.get("reduce_bucket_size") == "auto"
    return Setup(
        "zero",
        halves[0] if halves else "no",
        processes,
        stage,
        bucket=None if accelerate_fills_in else elements("reduce_bucket_size", 5e8),
        buckets=2 if zero.get("overlap_comm") is True and stage < 3 else 1,
        live=elements("stage3_max_live_parameters", 1e9),
        sub_group=elements("sub_group_size", 1e9),
        optimizer_on_cpu=places["optimizer"] == "cpu",
        weights_on_cpu=places["param"] == "cpu" and stage == 3,
    )


# ============================================================ the states


def trained_states(setup: Setup, counts: Counts, learned: int, still: int) -> list[State]:
    """Returns the states of the trained models, with AdamW.

    Args:
        learned: how many numbers are trained.
        still: how many frozen ones below adapters are neither rounded nor packed.
    """
    if setup.kind == "zero":
        return zero_states(setup, counts, learned, still)
    if setup.kind == "fsdp2":
        return fsdp2_states(setup, counts, learned)
    return ddp_states(setup, learned, still)


def ddp_states(setup: Setup, learned: int, still: int) -> list[State]:
    """Returns what `trained_states` does, under DDP or in a single process."""
    states = [
        State("trained weights", 4 * learned),
        State("gradients", 4 * learned, setup.while_adding + "bs"),
        State("Adam", 8 * learned),
    ]
    if setup.kind == "ddp":
        # DDP reduces copies of the gradients, and keeps them.
        states.append(State("DDP's buckets", 4 * learned))
    if setup.has_autocast:
        states.append(State("half copies (autocast), at most", 2 * (learned + still), "f"))
    return states


def fsdp2_states(setup: Setup, counts: Counts, learned: int) -> list[State]:
    """Returns what `trained_states` does, under FSDP2."""
    share = learned / setup.processes
    return [
        State("trained weights", 4 * share, place=setup.place_of_weights),
        # FSDP2 reduces gradients after the last micro-batch only. Before, they add up whole on
        # every GPU.
        State("gradients that add up", 4 * learned, setup.while_adding),
        State("gradients", 4 * share, "bs", setup.place_of_optimizer),
        State("Adam", 8 * share, place=setup.place_of_optimizer),
        State("gathered, one layer", setup.size * counts.unit, "f"),
    ]


def zero_states(setup: Setup, counts: Counts, learned: int, still: int) -> list[State]:
    """Returns what `trained_states` does, under DeepSpeed."""
    share = learned / setup.processes
    if setup.stage == 3:
        gradients = zero3_gradients(setup, learned, still)
    elif setup.optimizer_on_cpu:
        gradients = offloaded_gradients(setup, learned)
    else:
        gradients = zero1_or_2_gradients(setup, learned)
    bucket = counts.hidden**2 if setup.bucket is None else setup.bucket
    moments_of_buffer = {1: setup.while_adding + "b", 2: "b", 3: "fbs"}
    weights = setup.size * (share if setup.stage == 3 else learned)
    return [
        State("trained weights", weights, place=setup.place_of_weights),
        State("fp32 masters", 4 * share, place=setup.place_of_optimizer),
        State("Adam", 8 * share, place=setup.place_of_optimizer),
        *gradients,
        State(
            "reduction buffer", setup.size * bucket * setup.buckets, moments_of_buffer[setup.stage]
        ),
    ]


def zero3_gradients(setup: Setup, learned: int, still: int) -> list[State]:
    """Returns the gradients under ZeRO-3, and the weights that it keeps gathered."""
    share = learned / setup.processes
    # From the start of the step the fp32 copies of one group of parameters are there besides the
    # gradients.
    copies = State("fp32 gradients", 4 * min(share, setup.sub_group), "s")
    if setup.optimizer_on_cpu:
        copies = State("fp32 gradients", 4 * share, place="CPU")
    states = [State("gradients", setup.size * share), copies]
    if setup.processes > 1:
        gathered = min(learned + still, setup.live)
        states.append(State("gathered, at most", setup.size * gathered, "f"))
    return states


def offloaded_gradients(setup: Setup, learned: int) -> list[State]:
    """Returns the gradients under ZeRO-1 and 2 where Adam runs on the CPU."""
    share = learned / setup.processes
    if setup.stage == 1:
        adding = State("gradients", setup.size * learned, setup.while_adding)
    else:
        moments = "fbs" if setup.accumulates else ""
        adding = State("gradients that add up", setup.size * share, moments, "CPU")
    return [
        adding,
        State("fp32 gradients", 4 * share, place="CPU"),
        State("half copy", setup.size * share, place="CPU"),
    ]


def zero1_or_2_gradients(setup: Setup, learned: int) -> list[State]:
    """Returns the gradients under ZeRO-1 and 2 where Adam runs on the GPU."""
    share = learned / setup.processes
    if setup.stage == 1:
        # Whole gradients add up, and are split at the end.
        gradients = [
            State("gradients", setup.size * learned, setup.while_adding),
            State("gradients", setup.size * share, "bs"),
        ]
    else:
        # Parts of gradients add up. Besides them there is the part of the micro-batch that just
        # ran.
        of_this = "b" if setup.accumulates else ""
        gradients = [
            State("gradients", setup.size * share, setup.while_adding + "bs"),
            State("gradients of this micro-batch", setup.size * share, of_this),
        ]
    return [*gradients, State("fp32 gradients", 4 * share, "s")]


def frozen_states(setup: Setup, name: str, counts: Counts, models: int) -> list[State]:
    """Returns the weights of models that are only read.

    Args:
        counts: of each model. Its rounded and its packed weights are states of their own.
        models: how many there are.
    """
    is_split = setup.kind == "fsdp2" or setup.stage == 3
    copies = models / setup.processes if is_split else models
    # FSDP2 rounds all weights when it gathers them, so frozen ones are held rounded.
    size = 4 if setup.kind in ("plain", "ddp") else setup.size
    others = counts.parameters - counts.rounded - counts.packed
    states = [State(name, size * copies * others, place=setup.place_of_weights)]
    if counts.rounded:
        states.append(State(f"{name}, half", 2 * copies * counts.rounded))
    if counts.packed:
        states.append(State(f"{name}, 4 bits", PACKED_SIZE * copies * counts.packed))
    return states


# ============================================================ activations


def activations(setup: Setup, config, tokens: int, checkpointing: bool = False) -> list[State]:
    """Estimates what a micro-batch's forward pass keeps for its backward pass, of one model.

    A token keeps, in each layer of a decoder with a gated MLP and an attention without its matrix
    of scores, with h the hidden size, q and kv the sizes of all queries and of all keys, and m that
    of the MLP:

        4 h                    what its two norms read, and what they make of it
        3 q + 4 kv             queries, keys before and after rotation; values; attention's result
        4 m                    gate, its activation, the other half, their product

    All in fp32; in half precision the norms still compute in fp32, and their output is rounded to
    another 2 h. With `checkpointing` a layer keeps its input, and one layer at a time all.

    Besides there are the logits of a piece of at most 2^27 numbers, and their log-probs in fp32.

    How far this is from what is kept: docs/memory.md. The experts of a mixture are not counted.

    Args:
        config: of the text model.
        tokens: of a micro-batch, padding counted.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head_size
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden

    products = setup.size * (3 * queries + 4 * keys + 4 * inner)
    norms = 16 * hidden if setup.size == 4 else 20 * hidden
    layers = config.num_hidden_layers
    of_token = layers * (norms + products)
    if checkpointing:
        of_token = layers * 4 * hidden + norms + products
    logits = min(tokens * config.vocab_size, CHUNK_ELEMENTS)
    return [
        State("activations, about", tokens * of_token, "f"),
        State("logits, about", logits * (setup.size + 4), "f"),
    ]


# ============================================================ the model


def count(
    name: str, lora_r: int = 0, load_in_4bit: bool = False, device_type: str = "cuda"
) -> Counts:
    """Counts the numbers of a causal language model without reading its weights.

    Args:
        lora_r: rank of an adapter on all linear layers; 0: none.
        device_type: see `rounding.rounded_by_autocast`.

    Raises:
        SystemExit: there is no model of that name, or transformers does not know its architecture.
    """
    model = build(name)
    head = model.get_output_embeddings()
    names_of_layers = model._no_split_modules or []
    units = [module for module in model.modules() if type(module).__name__ in names_of_layers]
    units += [part for part in (model.get_input_embeddings(), head) if part is not None]
    linear = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    adapted = lora.layers_to_adapt(model, [lora.ALL_LINEAR]) if lora_r else []
    shapes = [model.get_submodule(layer).weight.shape for layer in adapted]
    wrapper = LogProbModel(model)
    rounded = rounding.rounded_by_autocast(wrapper, device_type)
    return Counts(
        parameters=parameters_of(model),
        unit=max(map(parameters_of, units)),
        hidden=model.config.get_text_config().hidden_size,
        adapter=lora_r * sum(map(sum, shapes)),
        packed=sum(layer.weight.numel() for layer in linear) if load_in_4bit else 0,
        rounded=sum(wrapper.get_parameter(path).numel() for path in rounded),
    )


def parameters_of(module: nn.Module) -> int:
    """Counts the numbers in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def build(name: str) -> PreTrainedModel:
    """Builds a causal language model without weights; see `count`."""
    load.refuse_adapter(name)
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


# ============================================================ the table


def table(
    setup: Setup,
    counts: Counts,
    trained: int = 1,
    frozen: int = 0,
    of_micro_batch: Sequence[State] = (),
) -> list[Row]:
    """Returns what one process holds: the states on its GPU and their sum, then those on its CPU.

    The trained models are parts of one engine, as in all recipes, so buffers of fixed size are
    counted once.

    Args:
        counts: of each model.
        trained: number of trained models.
        frozen: number of models that are only read.
        of_micro_batch: the `activations` of each trained model.
    """
    if not setup.has_autocast:
        counts = counts._replace(rounded=0)
    learned = trained * counts.parameters
    still = 0
    states = []
    if counts.adapter:
        # A model of 4 bits has its other weights in fp32.
        base = counts._replace(rounded=0) if counts.packed else counts
        states += frozen_states(setup, "weights of the base", base, trained)
        learned = trained * counts.adapter
        still = trained * (base.parameters - base.rounded - base.packed)
    states += trained_states(setup, counts, learned, still)
    if frozen:
        states += frozen_states(setup, "frozen weights", counts._replace(packed=0), frozen)
    states += [state._replace(bytes=trained * state.bytes) for state in of_micro_batch]
    return [*rows_of("GPU", states), *rows_of("CPU", states)]


def rows_of(place: str, states: list[State]) -> list[Row]:
    """Returns the states in one place and their sum; nothing if there are none."""
    rows = []
    for state in states:
        if state.place == place and state.moments:
            sizes = [state.bytes * (moment[0] in state.moments) for moment in MOMENTS]
            rows.append(Row(place, state.name, *sizes))
    if not rows:
        return []
    sums = [sum(getattr(row, moment) for row in rows) for moment in MOMENTS]
    return [*rows, Row(place, "sum", *sums)]


def print_table(rows: list[Row]) -> None:
    moments = " ".join(f"{moment:>9}" for moment in MOMENTS)
    print(f"{'for each process':40} {moments}  GiB")
    for place, name, *sizes in rows:
        in_gib = " ".join(f"{size / GIB:9.3f}" for size in sizes)
        print(f"{place} {name:36} {in_gib}")


def read_arguments() -> argparse.Namespace:
    show_any_text()
    parser = argparse.ArgumentParser(
        prog="python -m preference_recipes.tools.memory",
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
    parser.add_argument(
        "--micro_train_tokens",
        type=int,
        default=16384,
        help="tokens of a micro-batch, for activations; default: 16384, that of the recipes on a "
        "GPU; 0: leave activations and logits out",
    )
    parser.add_argument("--gradient_checkpointing", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    setup = read_setup(args.config, args.num_processes)
    setup = setup._replace(accumulates=args.accumulation_steps > 1)
    if args.load_in_4bit and (args.lora_r <= 0 or setup.kind not in ("plain", "ddp")):
        sys.exit("--load_in_4bit: expected --lora_r, and a config of one process or DDP")
    counts = count(args.model, max(args.lora_r, 0), args.load_in_4bit)
    print(f"{args.model}: {counts.parameters:,} parameters, tied ones once")
    print(f"{setup.name}, N = {setup.processes}, {args.trained} trained, {args.frozen} frozen")
    if counts.adapter:
        adapter = f"{counts.adapter:,} parameters for each trained model"
        print(f"adapters of rank {args.lora_r}: {adapter}")
    print()
    of_micro_batch = []
    if args.micro_train_tokens > 0:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=False).get_text_config()
        tokens = args.micro_train_tokens
        of_micro_batch = activations(setup, config, tokens, args.gradient_checkpointing)
    print_table(table(setup, counts, args.trained, args.frozen, of_micro_batch))
    print(f"\n{OMITTED}")


if __name__ == "__main__":
    main()
