"""The demo under every way to launch: greedy answers, half precision, the actor that is saved."""

import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from preference_recipes.models import prepare
from runs import (
    ASSETS,
    config_launcher,
    evaluation_lines,
    first_rows,
    launch,
    recipe,
    tiny_llama,
    training_lines,
)

FEW_ROWS = 150  # held out: their answers are much of a run
FEW = ["--warmup_steps", 0, "--micro_train_batch_size", 16, "--lr_scheduler_type", "constant"]
# Every window meets the same weights: half precision can be compared window by window, whichever were skipped.
STILL = [*FEW, "--max_steps", 6, "--eval_steps", 6, "--save_steps", 6, "--learning_rate", 0]
WAYS = {
    "still": [],
    "ddp_bf16": config_launcher("ddp", 2),
    "fsdp2_bf16": config_launcher("fsdp2", 2),
    "ds_fp16": config_launcher("ds_fp16", 2),
    "ds_zero2": config_launcher("ds_zero2", 2),
    "ds_zero3": config_launcher("ds_zero3", 2),
}


FAST = ("ds_zero3",)  # the others are launched by the slow tests alone


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    done, held_out = (
        {},
        first_rows(
            tmp_path_factory.mktemp("held_out") / "few.jsonl",
            ASSETS / "preferences_eval.jsonl",
            FEW_ROWS,
        ),
    )

    def run(way):
        if way not in done:
            done[way] = tmp_path_factory.mktemp("strategies") / way
            more = ["--eval_dataset_name", held_out, "--output_dir", done[way]]
            launch(WAYS[way], recipe("dpo"), *STILL, *more)
        return done[way]

    return run


def further_slow(ways):
    return [
        pytest.param(way, marks=[pytest.mark.slow] * (way not in ("still", *FAST))) for way in ways
    ]


def test_buffers_are_not_rounded_with_the_weights(tmp_path):
    """DeepSpeed's `module.half()` rounds the rotary frequencies, too: too little for a tolerance to show it on short rows."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine = types.SimpleNamespace(
        device="cpu",
        is_fsdp2=False,
        mixed_precision="fp16",
        prepare=lambda model, optimizer: (model.half(), optimizer),
        state=types.SimpleNamespace(
            deepspeed_plugin=types.SimpleNamespace(
                deepspeed_config={"zero_optimization": {"stage": 2}}
            )
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, _ = prepare.for_training(engine, model, optimizer)
    assert before and {parameter.dtype for parameter in prepared.parameters()} == {torch.float16}
    for name, buffer in prepared.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, before[name])


@pytest.mark.parametrize(
    "way", further_slow(["ddp_bf16", "fsdp2_bf16", "ds_fp16", "ds_zero2", "ds_zero3"])
)
def test_half_precision_gives_the_numbers_of_fp32(demo, way):
    """Window by window, with 2 processes: loss, gradient norm before clipping, the metrics; each YAML as it is."""
    by_window = {line["global_step"]: line for line in training_lines(demo("still"))}
    lines = training_lines(demo(way))
    skipped = (
        lines[0]["skipped_steps"] if way == "ds_fp16" else 0
    )  # where 2**16 overflows, at the start
    assert [line["skipped_steps"] for line in lines] == [skipped] * 6
    assert {line.get("loss_scale") for line in lines} == (
        {2.0 ** (16 - max(skipped - 1, 0))} if way == "ds_fp16" else {None}
    )
    error = 2e-3 if way == "ds_fp16" else 2e-2
    for line in lines[: 6 - skipped]:
        exact = by_window[line["global_step"] + skipped]
        assert line["loss"] == pytest.approx(exact["loss"], rel=error)
        assert line["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2 * error)
        for key in ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"):
            assert line[key] == pytest.approx(exact[key], rel=error)
    first = evaluation_lines(demo(way))[0]
    assert (
        first["eval/rewards/margins"] == 0
    )  # the reference is the policy as it starts, bit for bit
    assert first["eval/exact_match"] == pytest.approx(
        evaluation_lines(demo("still"))[0]["eval/exact_match"], abs=0.02
    )


@pytest.mark.parametrize("way", further_slow(WAYS))
def test_the_saved_actor_is_the_one_evaluated(demo, way):
    """Its dtype is that of the forward pass, and the log-probs plain transformers computes are those of the last evaluation."""
    output = demo(way)
    model = AutoModelForCausalLM.from_pretrained(output / "actor", dtype="auto")
    half = {
        "ds_fp16": torch.float16,
        "ddp_bf16": None,
        "fsdp2_bf16": None,
        "ds_zero2": torch.bfloat16,
        "ds_zero3": torch.bfloat16,
    }
    assert model.dtype == (
        half.get(way) or torch.float32
    )  # under autocast and FSDP2 the weights themselves are fp32
    assert (
        model.config.tie_word_embeddings
        and model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    )
    tokenizer = AutoTokenizer.from_pretrained(output / "actor")
    from datasets import load_dataset

    rows = load_dataset(
        "json", data_files=str(ASSETS / "preferences_eval.jsonl"), split=f"train[:{FEW_ROWS}]"
    )
    model, total = model.float(), 0.0
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    fulls = [
        tokenizer.apply_chat_template(row["prompt"] + row["chosen"], tokenize=False) for row in rows
    ]
    starts = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    batch = tokenizer(fulls, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        logps = (
            model(batch.input_ids, attention_mask=batch.attention_mask)
            .logits[:, :-1]
            .log_softmax(-1)
        )
    logps = logps.gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
    for row, start in enumerate(starts):
        total += logps[row, start - 1 : int(batch.attention_mask[row].sum()) - 1].sum().item()
    logged = evaluation_lines(output)[-1]["eval/logps/chosen"]
    assert total / len(rows) == pytest.approx(logged, rel=1e-2 if way in half else 1e-5)
