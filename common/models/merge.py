"""Makes a whole model of an adapter's folder, by adding the adapter to its base.

Run alone: `python -m common.models.merge ADAPTER OUT`.
"""

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from common import REPOSITORY, distributed, folders, hub, in_one_line
from common.models import load, lora

# What a merged model was made of.
SOURCE_FILE = "merged_from.json"
# What a launcher tells its processes begins with one of these.
OF_LAUNCHER = (
    "ACCELERATE_",
    "FSDP_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_",
    "GROUP_",
    "TORCHELASTIC_",
)


def name_to_load(
    accelerator, name: str | None, output_dir: str, folder: str = "base"
) -> str | None:
    """Returns the name of a whole model: `name`, unless that is the folder of an adapter.

    An adapter is merged into its base, once, in `<output_dir>/<folder>`. All processes must call
    it.

    Args:
        name: a folder or a hub name. None stands for no model.

    Raises:
        SystemExit: the adapter could not be merged.
    """
    if name is None:
        return None
    place = Path(output_dir).resolve() / folder
    return distributed.on_main_process(accelerator, find_or_write, name, place)


def find_or_write(name: str, place: Path) -> str:
    """Does the work of `name_to_load` on one process."""
    if not is_adapter(name):
        return name
    source = {"adapter": name, "weights": fingerprint_of(name)}
    if place.exists():  # it is whole, or it would not be there
        merged_from = json.loads((place / SOURCE_FILE).read_text(encoding="utf-8"))
        if merged_from["weights"] == source["weights"]:
            return str(place)
        if any(place.parent.glob("checkpoints/*")):
            sys.exit(
                f"{place} was merged from {merged_from['adapter']} as it was then, and the "
                f"checkpoints beside it need it. {name} is another one: take another --output_dir"
            )
    print(f"{name} is an adapter: merged into its base, in {place}", flush=True)
    # In a process without a launcher: in this one transformers might cut the weights for ZeRO-3 or
    # FSDP2, and wait for the other processes.
    temporary = place.with_name(f".{place.name}.writing")
    local_name = str(Path(name).resolve()) if Path(name).is_dir() else name
    result = subprocess.run(
        [sys.executable, "-m", "common.models.merge", local_name, str(temporary)],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHER)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        said = result.stderr.strip() or f"merging {name} ended with status {result.returncode}"
        sys.exit(said.splitlines()[-1])
    (temporary / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    folders.replace(temporary, place)
    return str(place)


def fingerprint_of(adapter: str) -> str:
    """Identifies the weights and the config of an adapter."""
    config = lora.import_library("peft", f"the adapter {adapter!r}", "lora").PeftConfig
    settings = json.dumps(config.from_pretrained(adapter).to_dict(), sort_keys=True, default=str)
    return f"{load.describe_weights(adapter, None)}, settings {zlib.crc32(settings.encode()):08x}"


def is_adapter(name: str) -> bool:
    """Whether a folder or a hub name holds an adapter instead of a whole model."""
    if Path(name).is_dir():
        return (Path(name) / "adapter_config.json").is_file()
    hub.reach()
    try:
        return find_adapter_config_file(name) is not None
    except Exception:  # no such name, or no network: whoever loads it says so
        return False


def write(adapter: str | Path, out: Path) -> None:
    """Writes the model that an adapter makes of its base to a folder, in fp32, with its tokenizer.

    Args:
        adapter: a folder or a hub name.
        out: a folder that is replaced if it is there.

    Raises:
        SystemExit: the base is not there, is an adapter itself, or does not fit.
    """
    adapter = str(adapter)
    peft = lora.import_library("peft", needed_by=f"the adapter {adapter!r}", extra="lora")
    base_name = None
    try:
        config = peft.PeftConfig.from_pretrained(adapter)
        base_name = config.base_model_name_or_path
        base = load_base(base_name, config.task_type)
        tokenizer = tokenizer_of(adapter, base_name)
        if len(tokenizer) > base.config.get_text_config().vocab_size:
            base.resize_token_embeddings(len(tokenizer))  # the adapter has the new rows
        model = peft.PeftModel.from_pretrained(base, adapter)
        merged = model.merge_and_unload(safe_merge=True)  # it looks for what is not finite
        merged.config.update(moments_of(adapter))
        if merged.can_generate():
            published = generation_config_of(adapter, merged).to_dict()
            merged.generation_config = load.PublishedGenerationConfig.from_dict(published)
        shutil.rmtree(out, ignore_errors=True)
        merged.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except Exception as error:  # whatever peft and transformers raise
        load.refuse_own_code(base_name or adapter, error)
        reason = in_one_line(error)
        sys.exit(f"the adapter {adapter!r} of {base_name!r} cannot be merged: {reason}")


def load_base(name: str, task_type: str):
    """Loads the base of an adapter in fp32."""
    if is_adapter(name):
        raise ValueError("the base is an adapter itself: merge that one first")
    if task_type == "SEQ_CLS":
        base = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, dtype=torch.float32, trust_remote_code=False
        )
    else:
        base = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=False
        )
    if getattr(base, "hf_quantizer", None) is not None:
        raise ValueError(
            "the base holds quantized weights: name the model that they were made of as "
            "base_model_name_or_path in adapter_config.json"
        )
    return base


def moments_of(adapter: str) -> dict[str, float]:
    """Returns the mean and the standard deviation that `lora.save` wrote for a reward model."""
    file = cached_file(adapter, lora.MOMENTS_FILE, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def tokenizer_of(adapter: str, base: str):
    """Returns the tokenizer beside an adapter, or else that of its base."""
    try:
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    except Exception:  # whatever says that there is none
        return AutoTokenizer.from_pretrained(base, trust_remote_code=False)


def generation_config_of(adapter: str, base) -> GenerationConfig:
    """Returns the generation config beside an adapter, or else that of its base."""
    try:
        return GenerationConfig.from_pretrained(adapter)
    except OSError:  # there is none
        return base.generation_config


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
