"""What each state takes per parameter, measured on CPU processes: docs/memory.md has the formulas.

    python benchmarks/memory.py [--processes 1 2] [--frozen 1] [--layers 6] [--steps 2] [--lora_r 0] [--configs YAML_OR_JSON ...]

Each config is launched with a random Llama (9 million parameters with 6 layers): the project's own `make_accelerator`, `for_training` and
`frozen`, two updates of two micro-batches (`--steps`) of 16 tokens. In the second update each storage that a live tensor has is counted once, as
the state it belongs to, at three moments:

    forward    at the end of the last micro-batch's forward, as its backward begins: when activations are at their largest
    backward   at the end of its backward; under ZeRO-1 and -2 before the engine lays the gradients together
    step       as the optimizer's own step begins (of several parameter groups the one where most stands)

Bytes per parameter of one model are printed, of rank 0. `other` is what else the process's heap grew by since before the
model was built: activations, temporary buffers, modules imported late, and on a CPU the fp32 copies by which half precision is emulated.
DeepSpeed's reduction buffer is made small and no parameter is left unsharded for being small: both would hide the rest in a model of this size.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes import CDLL, Structure, c_size_t
from pathlib import Path

import torch
import yaml
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = [
    "single_gpu.yaml",
    "ddp.yaml",
    "fsdp2.yaml",
    "ds_zero2.yaml",
    "ds_fp16.yaml",
    "ds_zero3.yaml",
]
# What `optim.parameter_groups` reads.
DECAY = argparse.Namespace(weight_decay=0.1)
MODEL = dict(
    hidden_size=256, intermediate_size=688, num_attention_heads=8, vocab_size=8192
)  # and the number of layers
MOMENTS = ("forward", "backward", "step")
STATES = (
    "weights",
    "frozen",
    "gathered",
    "masters",
    "Adam",
    "reduction buffer",
    "gradients",
    "DDP's buckets",
)
SMALL_BUCKET = 2**22  # elements: DeepSpeed's own of 5e8 would be most of what a small model takes


# ============================================================ one process of a launch
def tensors_of(name: str, accelerator, prepared, optimizer, frozen) -> Iterator:
    """The tensors that hold one state, wherever the engine keeps them."""
    engine = prepared.optimizer if hasattr(prepared, "optimizer") else None  # DeepSpeed's optimizer
    parameters = list(prepared.parameters())
    if name in ("weights", "frozen"):
        sharded = isinstance(
            prepared, FSDPModule
        )  # then a gathered parameter stands in the module in its shard's place
        for p in (
            ([] if sharded else parameters)
            if name == "weights"
            else [p for model in frozen for p in model.parameters()]
        ):
            yield getattr(p, "ds_tensor", p.data)  # under ZeRO-3 its shard
    if name == "weights":
        yield from (p._sharded_param_data for p in fsdp_parameters(prepared))
    if name == "gathered":
        yield from (p.data for p in parameters if hasattr(p, "ds_tensor"))
        yield from (
            p._unsharded_param for p in fsdp_parameters(prepared) if hasattr(p, "_unsharded_param")
        )
    elif name == "gradients":
        yield from (p.grad for p in parameters)
        yield from (p.grad for group in optimizer.param_groups for p in group["params"])
        for attribute in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(engine, attribute, {}).values():
                yield from group or []
        yield getattr(engine, "grad_partitions_flat_buffer", None)
        yield from getattr(
            engine, "accumulated_grads_in_cpu", {}
        ).values()  # with offload_optimizer
        yield getattr(engine, "grads_in_partition", None)
        yield from (p.unsharded_accumulated_grad for p in fsdp_parameters(prepared))
        for group in masters_of(engine):
            yield group.grad
    elif name == "masters":
        yield from masters_of(engine)
        yield from getattr(engine, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    elif name == "Adam":
        states = engine.optimizer.state if engine else optimizer.state
        yield from (
            value
            for state in states.values()
            for value in state.values()
            if hasattr(value, "untyped_storage")
        )
    elif name == "reduction buffer":
        for bucket in getattr(engine, "ipg_buckets", {}).values():
            yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]


def fsdp_parameters(prepared) -> Iterator:
    """FSDP2's own record of each parameter."""
    for module in prepared.modules():
        group = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        yield from group.fsdp_params if group else []


def masters_of(engine) -> list:
    return (
        getattr(engine, "single_partition_of_fp32_groups", None)
        or getattr(engine, "fp32_partitioned_groups_flat", None)
        or []
    )


def storages(tensors) -> dict[int, int]:
    """Bytes of each storage by its address. A sharded tensor counts with its local part."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
    found = [tensor.untyped_storage() for tensor in local if tensor.device.type != "meta"]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def held(seen: dict, *state) -> dict[str, int]:
    """Bytes by state; a storage counts for the first state that has it."""
    table, taken = {}, set()
    for name in STATES[:-1]:
        found = storages(tensors_of(name, *state))
        table[name] = sum(size for address, size in found.items() if address not in taken)
        taken |= found.keys()
    table[STATES[-1]] = sum(size for address, size in seen.items() if address not in taken)
    return table


def bare_accelerator(steps: int):
    """The recipes' accelerator, for windows of `steps` micro-batches of one row a process; nothing it writes is kept."""
    from common import launch

    world = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as folder:
        args = argparse.Namespace(
            train_batch_size=steps * world,
            micro_train_batch_size=1,
            micro_train_tokens=0,
            max_grad_norm=1.0,
            seed=0,
            resume="never",
            output_dir=f"{folder}/out",
            report_to=["none"],
        )
        accelerator = launch.make_accelerator(args, "bare")
        accelerator.wait_for_everyone()
    return accelerator


def worker(layers: int, frozen_models: int, steps: int, lora_r: int = 0) -> None:
    """Runs two updates and prints the table of rank 0 as a line of JSON."""
    from transformers import AutoModelForCausalLM

    from common import optim
    from common.engine import describe
    from common.engine import zero_stage as stage
    from preference_recipes.models import lora, packing, prepare
    from preference_recipes.models.logprobs import LogProbModel

    config = LlamaConfig(**MODEL, num_hidden_layers=layers)
    accelerator = bare_accelerator(steps)
    tables, buckets = {}, {}
    gc.collect()
    before = allocated()
    policy = LogProbModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    settings = argparse.Namespace(
        lora_r=lora_r, lora_alpha=16.0, lora_dropout=0.0, lora_target_modules=["all-linear"]
    )
    if lora_r:
        lora.add_adapters(policy, settings)
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, DECAY), lr=1e-4)
    raw = optimizer
    prepared, optimizer = prepare.for_training(accelerator, policy, optimizer)
    others = [
        AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(frozen_models)
    ]
    others = [prepare.frozen_model(accelerator, LogProbModel(other)) for other in others]
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
    if hasattr(prepared, "register_comm_hook"):

        def hook(world, bucket):  # DDP's buckets live in C++: only a hook sees them
            buckets[bucket.index()] = storages(
                [bucket.buffer()]
            )  # DDP lays them out anew after its first backward
            work = torch.distributed.all_reduce(bucket.buffer().div_(world), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        prepared.register_comm_hook(accelerator.num_processes, hook)

    def measure(moment: str) -> None:
        gc.collect()
        table = held(
            {k: v for found in buckets.values() for k, v in found.items()},
            accelerator,
            prepared,
            raw,
            others,
        )
        table["other"] = allocated() - before - sum(table.values())
        if sum(table.values()) >= sum(tables.get(moment, {}).values()):
            tables[moment] = table

    deepspeed = getattr(prepared, "step", None)  # accelerate calls it inside backward
    if deepspeed:

        def step(*arguments, **names):
            measure("backward")
            return deepspeed(*arguments, **names)

        prepared.step = step
        epilogue = getattr(prepared.optimizer, "independent_gradient_partition_epilogue", None)
        if epilogue and stage(accelerator) < 3:

            def first_measure():
                measure("backward")
                epilogue()

            prepared.optimizer.independent_gradient_partition_epilogue = first_measure
    raw.register_step_pre_hook(lambda *_: measure("step"))
    answer = torch.randint(0, MODEL["vocab_size"], (15,)).tolist()
    batch = packing.Packer(accelerator.device).make_batch([[1]], [answer])
    for _update in range(2):
        tables.clear()
        for micro in range(steps):
            with accelerator.accumulate(prepared):
                with torch.no_grad():
                    for other in others:
                        other(batch)
                logps = prepared(batch)["logps"]
                if micro == steps - 1:
                    logps.register_hook(lambda _: measure("forward"))
                loss = -logps.mean()
                accelerator.backward(loss)
                del loss, logps
                if accelerator.sync_gradients and not deepspeed:
                    measure("backward")
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        result = {
            "launch": describe(accelerator),
            "processes": accelerator.num_processes,
            "parameters": parameters,
            "measured": tables,
        }
        if accelerator.device.type == "cuda":
            result["peak on the GPU"] = torch.cuda.max_memory_allocated()
        print("MEASURED " + json.dumps(result), flush=True)
    accelerator.end_training()


class Mallinfo2(Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated() -> int:
    """Bytes of the process's heap in use, C++ tensors and all that is no tensor included. Linux only."""
    function = CDLL("libc.so.6").mallinfo2
    function.restype = Mallinfo2
    info = function()
    return info.uordblks + info.hblkhd


# ============================================================ launching
def small_config(config: Path, folder: Path) -> Path:
    """A copy of a YAML, or one that names a DeepSpeed JSON, with sizes of DeepSpeed's that fit a small model."""
    plain = config.suffix == ".json"
    settings = yaml.safe_load(
        (REPOSITORY / "accelerate_configs/ds_zero2.yaml" if plain else config).read_text()
    )
    if "deepspeed_config" in settings:
        engine = json.loads(
            (
                config
                if plain
                else REPOSITORY / settings["deepspeed_config"]["deepspeed_config_file"]
            ).read_text()
        )
        zero = engine["zero_optimization"]
        zero |= {"reduce_bucket_size": SMALL_BUCKET, "stage3_param_persistence_threshold": 0}
        settings["deepspeed_config"] = {
            "deepspeed_config_file": f"{folder}/ds.json",
            "zero3_init_flag": zero["stage"] == 3,
        }
        (folder / "ds.json").write_text(json.dumps(engine))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def launch(
    config: Path,
    processes: int,
    frozen: int = 1,
    layers: int = 6,
    steps: int = 2,
    lora_r: int = 0,
) -> dict:
    """Launches a YAML or a DeepSpeed JSON; returns `{launch, parameters, measured}`, the last one bytes by moment and state."""
    with tempfile.TemporaryDirectory() as folder:
        small = small_config(config, Path(folder))
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(small),
            "--num_processes",
            str(processes),
            "--main_process_port",
            "0",
            str(Path(__file__).resolve()),
            "--worker",
            "--frozen",
            str(frozen),
            "--layers",
            str(layers),
            "--steps",
            str(steps),
            "--lora_r",
            str(lora_r),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)}
        result = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
        )
    found = [line for line in result.stdout.splitlines() if line.startswith("MEASURED ")]
    if not found:
        raise RuntimeError(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-4000:]}")
    return json.loads(found[0].removeprefix("MEASURED "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        type=Path,
        default=[REPOSITORY / "accelerate_configs" / name for name in CONFIGS],
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--frozen", type=int, default=1, help="frozen models beside the trained one"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="micro-batches of an update")
    parser.add_argument("--lora_r", type=int, default=0, help="rank of adapters; 0: none")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.layers, args.frozen, args.steps, args.lora_r)
    for config in args.configs:
        for processes in (
            args.processes
            if yaml.safe_load(config.read_text()).get("distributed_type") != "NO"
            else [1]
        ):
            result = launch(config, processes, args.frozen, args.layers, args.steps, args.lora_r)
            n = result["parameters"]
            print(
                f"\n{config.name}: {result['launch']}, N = {processes}, {n:,} parameters; bytes per parameter"
            )
            print(
                f"{'':10}" + "".join(f"{state:>18}" for state in (*STATES, "sum")) + f"{'other':>8}"
            )
            for moment in MOMENTS:
                measured = result["measured"][moment]
                other = measured.pop("other")
                sizes = [*(measured[state] for state in STATES), sum(measured.values())]
                line = "".join(f"{f'{size / n:.3f}' if size else '-':>18}" for size in sizes)
                print(f"{moment:10}{line}{other / n:>8.2f}", flush=True)
            if "peak on the GPU" in result:
                print(f"torch.cuda.max_memory_allocated: {result['peak on the GPU'] / n:.3f}")
    return None


if __name__ == "__main__":
    main()
