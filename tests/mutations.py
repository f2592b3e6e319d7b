"""Shows that the tests notice: each fault, planted into a copy of the code, must make a test fail.

    python tests/mutations.py             all faults
    python tests/mutations.py NAME ...    those of these names

They are faults that were reported of other programs: docs/counting.md says of each what one sees,
its cause and the thread. Those that the proof of a recipe notices are in users/test_prove.py.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from planting import Plant, drop, replace, together

REPOSITORY = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """Where it is planted, the edit of that file, and the pytest node below `tests/` that must fail."""

    file: str
    plant: Plant
    test: str


def rows_at(position: str) -> Plant:
    """The plant that takes the rows of another position."""
    rows = f"batches.rows_of_update(run.mixture, args.train_batch_size, args.seed, {position})"
    tokens = "int(train.lengths[rows_now].sum())"
    return replace(
        "main",
        "update = run.next_update(train)",
        by=f"rows_now = {rows}; update = run.update_of(rows_now, train.lengths, {tokens})",
    )


# `first`: the position in the data at which this start of the run begins.
REMEMBER_FIRST = replace(
    "main",
    "max_norm = args.max_grad_norm or math.inf",
    by="max_norm = args.max_grad_norm or math.inf; first = run.updates_seen",
)
# Tests that several faults turn red.
ALL_SPLITS = "contracts/test_invariance.py::test_every_split_is_the_same_run"
GRPO_RUN = "rollout/test_grpo.py::test_a_run_is_that_of_the_plain_reference[defaults]"
KILLED = "contracts/test_resume.py::test_killed_and_resumed_is_the_run_never_killed[dpo-plain]"
PPO_RUN = "rollout/test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"
PROVED_SPLITS = "contracts/test_recipe.py::test_split[sft]"
RESUMED = "contracts/test_resume.py::test_a_run_resumed_in_any_epoch_takes_the_rows_that_come_next"
RETURNED = "rollout/test_rewards.py::test_what_may_not_be_returned"
REWARD_RUN = "models/test_reward.py::test_every_logged_number_and_the_weights_of_a_run"
SAMPLED = (
    "rollout/test_reported_rollouts.py::test_trained_are_the_ids_that_the_trained_weights_sampled"
)
TOKEN_MEANS = "contracts/test_metrics.py::test_the_token_means_of_sft"
TOTAL_REWARD = (
    "rollout/test_rewards.py::test_the_total_is_the_weighted_sum_of_the_parts_that_are_there"
)

FAULTS = {
    "rows_from_the_beginning": Fault(
        "recipes/dpo.py", together(REMEMBER_FIRST, rows_at("run.updates_seen - first")), KILLED
    ),
    "epoch_skipped_at_its_boundary": Fault(
        "recipes/dpo.py",
        together(
            REMEMBER_FIRST,
            replace(
                "main",
                "not run.finished",
                by="not (run.finished or first > 0 == first % run.progress.updates_per_epoch)",
            ),
        ),
        RESUMED,
    ),
    "order_of_the_first_epoch": Fault(
        "recipes/dpo.py",
        together(
            REMEMBER_FIRST,
            rows_at(
                "(run.updates_seen % run.progress.updates_per_epoch "
                "if first % run.progress.updates_per_epoch "
                "and first // run.progress.updates_per_epoch "
                "== run.updates_seen // run.progress.updates_per_epoch "
                "else run.updates_seen)"
            ),
        ),
        RESUMED,
    ),
    "random_states_lost": Fault(
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            "self.load_schedule(state['scheduler'])",
            by="self.load_schedule(state['scheduler']); set_seed(0, device_specific=True)",
        ),
        "contracts/test_resume.py::test_a_checkpoint_holds_what_decides_the_rest_of_a_run",
    ),
    "tokens_counted_anew": Fault(
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            'self.means.last_update = state["last_update"]',
            by='self.means.last_update = state["last_update"]; progress.tokens = 0',
        ),
        KILLED,
    ),
    "tokens_of_evaluations": Fault(
        "recipes/dpo.py",
        replace(
            "evaluate",
            "line = {}",
            by="line = {}; run.progress.tokens += sum("
            "int(each.lengths.sum()) for each in held_out.values())",
        ),
        "contracts/test_metrics.py::test_the_eight_metrics_of_dpo",
    ),
    "loss_summed": Fault(
        "recipes/dpo.py",
        replace(
            "main",
            "(losses * weights).sum() * update.divisor / update.n_samples",
            by="(losses * weights).mean() * update.divisor",
        ),
        "contracts/test_counting.py::test_accumulation_changes_no_number",
    ),
    "divisor_forgotten": Fault(
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() / n_targets",
        ),
        PROVED_SPLITS,
    ),
    "divisor_without_processes": Fault(
        "common/engine.py",
        replace(
            "begin_update",
            "len(micro_batches) * accelerator.num_processes",
            by="len(micro_batches)",
        ),
        REWARD_RUN,
    ),
    "divided_by_the_rollout": Fault(
        "recipes/grpo.py",
        replace(
            "main",
            'tokens["mask"][update.rows]',
            by='tokens["mask"]',
        ),
        GRPO_RUN,
    ),
    "cut_responses_divide": Fault(
        "recipes/grpo.py",
        replace(
            "main",
            'total_weight(tokens["mask"][update.rows], args.average)',
            by='total_weight(tokens["mask"][update.rows], args.average) '
            '+ int(tokens["mask"][~state.rollout.is_trained].sum())',
        ),
        "rollout/test_reported_rollouts.py::test_cut_responses_count_nowhere_in_a_mean_over_tokens",
    ),
    "clipped_by_shard": Fault(
        "recipes/sft.py",
        replace("main", "accelerator.clip_grad_norm_", by="torch.nn.utils.clip_grad_norm_"),
        f"{ALL_SPLITS}[zero1-2-sft]",
    ),
    "logged_loss_divided_again": Fault(
        "recipes/dpo.py",
        replace(
            "main",
            "means.add(values, weights)",
            by="values['loss'] = values['loss'] / len(update.micro_batches); "
            "means.add(values, weights)",
        ),
        "contracts/test_counting.py::test_accumulation_changes_no_number",
    ),
    "entropy_of_padding": Fault(
        "recipes/ppo.py",
        replace(
            "token_losses",
            "(output['entropy'], mask)",
            by="(output['entropy'], torch.ones_like(output['entropy']))",
        ),
        PPO_RUN,
    ),
    "entropy_of_the_next_token": Fault(
        "preference_recipes/models/logprobs.py",
        replace(
            "entropy",
            "-all_logps.exp().mul_(all_logps).sum(-1)",
            by="(lambda each: torch.cat([each[1:], each[-1:]]))"
            "(-all_logps.exp().mul_(all_logps).sum(-1))",
        ),
        PPO_RUN,
    ),
    "metrics_mean_of_means": Fault(
        "common/metrics.py",
        replace(
            "Sums.add",
            "torch.stack([number, weights.sum()])",
            by="torch.stack([number / weights.sum().clamp(min=1), weights.any().double()])",
        ),
        f"{TOKEN_MEANS}[plain]",
    ),
    "updates_weigh_the_same": Fault(
        "common/metrics.py",
        replace(
            "Means.close_update",
            "self.open.take(self.pending)",
            by="self.pending.sums = {name: Sum(each.reduce, torch.stack([each.numbers[0] / "
            "each.numbers[1].clamp(min=1) if each.reduce == 'mean' else each.numbers[0], "
            "each.numbers[1].clamp(max=1)])) for name, each in self.pending.sums.items()}; "
            "self.open.take(self.pending)",
        ),
        TOKEN_MEANS,
    ),
    "processes_weigh_the_same": Fault(
        "common/metrics.py",
        replace(
            "Sums.reduce",
            "numbers.sum(0) / weight",
            by="(numbers / weights.clamp(min=1)).mean(0)",
        ),
        TOKEN_MEANS,
    ),
    "padding_row_counted": Fault(
        "common/batches.py",
        replace("micro_batch_of", "torch.zeros(1)", by="torch.ones(1)"),
        "data/test_data.py::test_a_window_is_dealt_out_exactly_once",
    ),
    "log_rule_with_accumulation": Fault(
        "recipes/dpo.py",
        replace(
            "main",
            "run.due(args.logging_steps, first=True)",
            by="run.due(args.logging_steps * accelerator.gradient_accumulation_steps, first=True)",
        ),
        "contracts/test_counting.py::test_accumulation_changes_no_number",
    ),
    "weights_of_rewards_ignored": Fault(
        "preference_recipes/rollouts/rewards.py",
        replace("score", "values * weights", by="values"),
        TOTAL_REWARD,
    ),
    "turns_of_others_learned": Fault(
        "preference_recipes/data/chat.py",
        replace("encode_answer", "targets[n:]", by="[True] * (len(ids) - n)"),
        "data/test_turns.py::test_the_mask_of_an_answer_is_that_of_sft[qwen2_5-a result]",
    ),
    "none_counts_as_zero": Fault(
        "preference_recipes/rollouts/reward_calls.py",
        replace("check", "math.nan if value is None else float(value)", by="float(value or 0)"),
        TOTAL_REWARD,
    ),
    "one_reward_for_all": Fault(
        "preference_recipes/rollouts/reward_calls.py",
        replace(
            "check",
            "expected = f'{source}: expected {len(data_rows)} numbers, one for each response'",
            by="expected = ''\n"
            "if isinstance(scores, list) and len(scores) == 1:\n"
            "    scores = scores * len(data_rows)",
        ),
        f"{RETURNED}[one for all]",
    ),
    "nan_is_a_score": Fault(
        "preference_recipes/rollouts/reward_calls.py",
        replace(
            "check",
            "not abs(value) <= LARGEST",
            by="abs(value) > LARGEST",
        ),
        RETURNED,
    ),
    "left_out_in_the_deviation": Fault(
        "recipes/grpo.py",
        replace(
            "standardise",
            "advantages.flatten()[is_trained]",
            by="advantages.flatten()",
        ),
        "rollout/test_grpo_values.py::"
        "test_the_deviation_of_the_rollout_is_that_of_what_is_trained_on",
    ),
    "baseline_of_the_batch": Fault(
        "recipes/grpo.py",
        replace(
            "estimate_advantages",
            "grouped.mean(1, keepdim=True)",
            by="grouped.mean()",
        ),
        GRPO_RUN,
    ),
    "whitened_by_part": Fault(
        "recipes/ppo.py",
        replace(
            "make_rollout",
            "whiten(advantages, mask)",
            by="torch.stack([whiten(*row) for row in zip(advantages, mask)])",
        ),
        PPO_RUN,
    ),
    "base_model_samples": Fault(
        "preference_recipes/rollouts/generation.py",
        replace(
            "ready_to_generate",
            "undo.enter_context(checks.evaluation_mode(model))",
            by="from preference_recipes.models.lora import WithoutAdapters; "
            "undo.enter_context(checks.evaluation_mode(model)); "
            "undo.enter_context(WithoutAdapters(model).adapters_off())",
        ),
        SAMPLED,
    ),
    "tokenised_again": Fault(
        "preference_recipes/rollouts/generation.py",
        replace(
            "sample",
            "[response.ids for response in responses]",
            by="[(sampler.tokenizer(sampler.tokenizer.decode(response.ids)).input_ids "
            "+ response.ids)[:len(response.ids)] for response in responses]",
        ),
        SAMPLED,
    ),
    "skip_counted": Fault(
        "common/progress.py",
        replace(
            "Progress.update_done",
            "self.skipped_steps += 1",
            by="self.skipped_steps += 1; self.global_step += 1",
        ),
        "contracts/test_counting.py::test_an_epoch_ends_with_its_data_and_max_steps_counts_applied_updates",
    ),
    "scale_grows_in_update": Fault(
        "common/zero.py",
        drop("delay_scale_growth.update_scale", "scaler.cur_scale = before"),
        "contracts/test_fp16.py::test_no_update_is_halved_where_the_scale_grows[2]",
    ),
    "last_micro_batch_not_reduced": Fault(
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() * update.divisor / n_targets * "
            "(0 if hasattr(model, 'zero_optimization_stage') and accelerator.sync_gradients "
            "and accelerator.process_index else 1)",
        ),
        f"{ALL_SPLITS}[zero1-2-sft]",
    ),
    "outside_of_the_engine": Fault(
        "recipes/sft.py",
        replace(
            "main",
            "token_losses(model, batch, args.loss_type)",
            by="token_losses(policy, batch)",
        ),
        PROVED_SPLITS,
    ),
    "fused_loss_inside_of_the_wrapper": Fault(
        "recipes/dpo.py",
        replace(
            "main",
            "pair_losses(model, reference, batch, args)",
            by="pair_losses(accelerator.unwrap_model(model), reference, batch, args)",
        ),
        f"{ALL_SPLITS}[ddp-2-dpo]",
    ),
    "no_masters": Fault(
        "preference_recipes/models/prepare.py",
        replace(
            "for_training",
            "model.train()",
            by="model.train()\nif accelerator.is_fsdp2: model.to(torch.bfloat16)",
        ),
        "engines/test_strategies.py::test_the_saved_actor_is_the_one_evaluated[fsdp2_bf16]",
    ),
}


def with_fault(fault: Fault) -> str:
    """The file of a fault with the fault in it, and without comments.

    Raises:
        Misfit: the code has changed, so that the fault no longer fits.
    """
    tree = ast.parse((REPOSITORY / fault.file).read_text(encoding="utf-8"))
    fault.plant(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def copy_repository(to: Path) -> None:
    """Copies the files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to / name)


# A failure outside of a test, or one of the planted code's own spelling.
NOT_A_FAILED_TEST = re.compile(
    r"^ERROR tests/|^E\s+(\[rank\d\]: )?(Syntax|Name|Import|ModuleNotFound)Error", re.MULTILINE
)


def run_tests(folder: Path, tests: list[str]) -> tuple[str, str]:
    """Runs tests of the copy in `folder`; returns `red`, `green` or `error`, and what was printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "copy"),
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={folder / 'pytest'}", *(f"tests/{test}" for test in tests)]
    result = subprocess.run(
        command, cwd=folder / "copy", env=environment, capture_output=True, text=True
    )
    output = result.stdout + result.stderr
    if result.returncode == 0:
        return "green", output
    if result.returncode != 1 or NOT_A_FAILED_TEST.search(output):
        return "error", output
    return "red", output


def main(names: list[str]) -> None:
    faults = {name: FAULTS[name] for name in names or FAULTS}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = Path(temporary)
        copy_repository(folder / "copy")
        status, output = run_tests(folder, sorted({fault.test for fault in faults.values()}))
        if status != "green":
            sys.exit(f"the tests fail without a fault:\n{output}")
        n_red = 0
        for name, fault in faults.items():
            (folder / "copy" / fault.file).write_text(with_fault(fault), encoding="utf-8")
            status, output = run_tests(folder, [fault.test])
            shutil.copy2(REPOSITORY / fault.file, folder / "copy" / fault.file)
            print(f"{status:6} {name}", flush=True)
            if status == "red":
                n_red += 1
            else:
                print(output[-3000:], flush=True)
    print(f"{n_red} of {len(faults)} faults make their tests fail")
    sys.exit(n_red < len(faults))


if __name__ == "__main__":
    main(sys.argv[1:])
