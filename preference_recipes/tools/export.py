"""Exports the actor of a checkpoint.

    python -m preference_recipes.tools.export CHECKPOINT OUT [--dtype bfloat16]
    python -m preference_recipes.tools.export CHECKPOINT OUT --critic
    python -m preference_recipes.tools.export CHECKPOINT OUT --merge

CHECKPOINT is a folder such as `runs/dpo/.../checkpoints/global_step_000100`. It is checked against
its manifest, and the actor's files that the manifest names are copied, bit for bit unless `--dtype`
converts them. OUT is then an ordinary Hugging Face folder. This works offline, without a GPU, and
reads no pickle. `--critic` exports PPO's critic, a sequence classifier with one label.

After `--lora_r` OUT is an ordinary folder of peft. With `--merge` it is a whole model: the adapter
is added to its base in fp32. The base is at the path in the adapter's config, or in the folder of
`--base`. A base that has changed since the run is refused. `--merge` also takes an adapter instead
of a checkpoint: a folder, such as a run's `actor/`, or a hub name.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from common import exit_on_refusal, folders, one_line, refuse

DTYPES = ("float32", "bfloat16", "float16")


def export(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    model: str = "actor",
    merge_adapter: bool = False,
    base: str | None = None,
) -> None:
    """Copies a model, `actor` or `critic`, of a checkpoint to `out`, or merges its adapter.

    Args:
        checkpoint: a folder `.../checkpoints/global_step_...`; with `merge_adapter` also an
            adapter's folder or hub name.
        out: must not exist, or be an empty folder.
        dtype: one of `DTYPES`; None: the weights stay as they are.
        base: the adapter's base; None: the one in its config.
    """
    out = out.resolve()  # a link would be replaced by a folder next to it
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse(f"{out} exists and is not an empty folder: choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        source = checkpoint
        if (checkpoint / "manifest.json").is_file() or not merge_adapter:
            source = Path(folder, "copy")
            copy_model(checkpoint, model, source)
        written = source
        if merge_adapter:
            written = Path(folder, "merged")
            merge(str(source), written, base)
        if dtype:
            convert(written, dtype)
        folders.replace(written, out)


def copy_model(checkpoint: Path, model: str, out: Path) -> None:
    """Copies a model's files that a checkpoint's manifest names, after checking the checkpoint."""
    fault = folders.fault_of(checkpoint)
    if fault:
        refuse(f"{checkpoint} is not a whole checkpoint: {fault}")
    manifest = folders.read_json(checkpoint / "manifest.json")
    names = [name for name in manifest if name.startswith(f"{model}/")]
    if not names:
        refuse(f"{checkpoint} holds no {model}: its manifest names none")
    for name in names:
        if (checkpoint / name).resolve() != checkpoint.resolve() / name:
            refuse(f"{checkpoint}: its manifest names {name!r}, a link or not in the checkpoint")
        copied = out / name.removeprefix(f"{model}/")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkpoint / name, copied)


def merge(adapter: str, out: Path, base: str | None = None) -> None:
    """Adds an adapter to its base, and writes the model to a folder in fp32, with its tokenizer.

    `adapter` is a folder or a hub name; for `base` see `export`.
    """
    from common import launch  # all of these are slow to import

    launch.quiet()
    import peft
    import torch
    import transformers
    from huggingface_hub import snapshot_download

    from common import saving
    from preference_recipes.models import load

    try:
        folder = Path(adapter if Path(adapter).is_dir() else snapshot_download(adapter))
    except Exception as error:
        refuse(f"{adapter} is no folder here, and not on the hub: {one_line(error)}")
    if not (folder / "adapter_config.json").is_file():
        refuse(f"{adapter} holds no adapter, as a run with --lora_r writes it: nothing to merge")
    config = peft.PeftConfig.from_pretrained(folder)
    base = base or config.base_model_name_or_path
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    name = str(folder if has_tokenizer else base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        name, trust_remote_code=False, mistral_format=False
    )
    load.add_processor(tokenizer, name)
    if config.task_type == "SEQ_CLS":
        auto_class = transformers.AutoModelForSequenceClassification
        model = load.from_pretrained(auto_class, base, dtype=torch.float32, num_labels=1)
    else:
        auto_class = load.class_for(base, tokenizer)
        model = load.from_pretrained(auto_class, base, dtype=torch.float32)
    new = load.describe_weights(base, model.config)
    file = folder / saving.BASE_FILE
    old = folders.read_json(file)["fingerprint"] if file.is_file() else new
    if old.partition(" ")[0] != new.partition(" ")[0]:  # a hub's commit, a folder's hash
        print(f"NOTE: the adapter was trained on {old}; {base} has {new}: not compared")
    elif old != new:
        refuse(f"{base} is not the adapter's base any more: that had {old}, this has {new}")
    model = peft.PeftModel.from_pretrained(model, folder).eval()
    ids = torch.linspace(0, model.get_input_embeddings().num_embeddings - 1, 32).long()[None]
    with torch.no_grad():
        expected = model(ids).logits
        merged = model.merge_and_unload(safe_merge=True)  # it refuses weights that are not finite
        difference = (merged(ids).logits - expected).abs().max().item()
    largest = expected.abs().max().item()
    # peft 0.21 merges the adapters of all layers that share a matrix, such as tied embeddings.
    if not difference <= 1e-3 * largest:  # NaN must fail, too
        refuse(
            f"the whole model would be another one: its logits differ by up to {difference:.3g}, "
            f"and are up to {largest:.3g} in size: load the adapter with peft instead"
        )
    if config.task_type == "SEQ_CLS":  # by it transformers finds the last token
        merged.config.pad_token_id = tokenizer.pad_token_id
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    moments = folder / saving.MOMENTS_FILE  # reward models have it
    if moments.is_file():
        merged.config.update(json.loads(moments.read_text(encoding="utf-8")))
    if merged.can_generate():
        published = merged.generation_config
        if (folder / "generation_config.json").is_file():
            published = transformers.GenerationConfig.from_pretrained(folder)
        merged.generation_config = load.PublishedGenerationConfig.from_dict(published.to_dict())
    merged.save_pretrained(out)
    saving.write_config(out, "float32")
    (tokenizer.processor or tokenizer).save_pretrained(out)


def convert(folder: Path, dtype: str) -> None:
    """Converts the floating-point weights of a Hugging Face folder, and its config with them."""
    from common import saving  # slow to import

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            names = file.keys()
            tensors = {name: saving.converted(file.get_tensor(name), dtype) for name in names}
        save_file(tensors, path, metadata=metadata)
    if (folder / "config.json").is_file():  # an adapter has none
        saving.write_config(folder, dtype)


@exit_on_refusal()
def main(words: list[str] | None = None, command: str | None = None) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=command, description=__doc__, formatter_class=layout)
    parser.add_argument("checkpoint", type=Path, help="with --merge also an adapter")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as they were trained")
    parser.add_argument("--critic", action="store_true", help="PPO's critic, not the actor")
    parser.add_argument("--merge", action="store_true", help="the whole model, not the adapter")
    parser.add_argument("--base", type=os.path.expanduser, help="with --merge: where its base is")
    args = parser.parse_args(words)
    if args.base and not args.merge:
        parser.error("--base is used by --merge alone")
    model = "critic" if args.critic else "actor"
    export(args.checkpoint, args.out, args.dtype, model, args.merge, args.base)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main(command="python -m preference_recipes.tools.export")
