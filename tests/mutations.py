"""Shows that the tests notice: each fault, planted into a copy of the code, must make a test fail.

    python tests/mutations.py             all faults
    python tests/mutations.py NAME ...    those of these names

The faults break contracts that cross processes or modules: how updates are counted, what a mean is
taken over, what a checkpoint holds, which rows come next. Several are known from other libraries.

The script copies all files that git does not ignore. First the tests must pass there without any
fault. Then it plants one fault at a time. A fault is red if a test fails, nothing fails outside of
the test, and it is not because the planted code cannot be read.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from planting import Misfit, Plant, drop, drop_call, replace, return_instead

REPOSITORY = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """One wrong thing that the tests must notice.

    Attributes:
        name: for the command line.
        breaks: what goes wrong, in words.
        file: where it is planted.
        plant: the edit of that file's syntax tree, see `planting.py`.
        test: a pytest node below `tests/` that must fail.
    """

    name: str
    breaks: str
    file: str
    plant: Plant
    test: str


# Tests that several faults turn red.
ALL_SPLITS = "contracts/test_invariance.py::test_every_split_is_the_same_run"
PROVED_SPLITS = "contracts/test_recipe.py::test_split[sft]"
OVERFLOWS = "contracts/test_fp16.py::test_what_overflows_leaves_no_trace"
GRPO_RUN = "rollout/test_grpo.py::test_a_run_is_that_of_the_plain_reference"
DISTILL_RUN = "rollout/test_distill.py::test_a_run_is_that_of_the_plain_reference"
PACKED = "models/test_logprobs.py::test_packed_answers_are_read_as_each_alone[llama]"
PPO_RUN = "rollout/test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"
RESTORED = "contracts/test_resume.py::test_a_checkpoint_holds_what_decides_the_rest_of_a_run"
REWARD_RUN = "models/test_reward.py::test_every_logged_number_and_the_weights_of_a_run"
SHARED_PREFILL = "rollout/test_ppo.py::test_responses_of_a_prompt_share_its_prefill"
TOKEN_MEANS = "contracts/test_metrics.py::test_the_token_means_of_sft"

# ============================================================ what is counted
COUNTING = [
    Fault(
        "skip_counted",
        "an update that the engine skipped counts as applied",
        "common/progress.py",
        replace(
            "Progress.update_done",
            "self.skipped_steps += 1",
            by="self.skipped_steps += 1; self.global_step += 1",
        ),
        "contracts/test_counting.py::test_an_epoch_ends_with_its_data_and_max_steps_counts_applied_updates",
    ),
    Fault(
        "last_update_forgotten",
        "an epoch has no place for its last, short update",
        "common/progress.py",
        replace(
            "Progress.__post_init__",
            "math.ceil(self.n_rows / self.train_batch_size)",
            by="self.n_rows // self.train_batch_size",
        ),
        "contracts/test_counting.py::test_log_lines_stand_at_the_first_the_multiples_and_the_last",
    ),
    Fault(
        "log_rule_with_accumulation",
        "lines come every logging_steps times the micro-batches of an update (OpenRLHF 429)",
        "recipes/dpo.py",
        replace(
            "main",
            "run.due(args.logging_steps, first=True)",
            by="run.due(args.logging_steps * accelerator.gradient_accumulation_steps, first=True)",
        ),
        "contracts/test_counting.py::test_accumulation_changes_no_number",
    ),
    Fault(
        "scheduler_steps_on_skip",
        "the learning rate moves on when an update was skipped",
        "recipes/sft.py",
        replace("main", "if applied: scheduler.step()", by="scheduler.step()"),
        f"{OVERFLOWS}[sft-2-2]",
    ),
    Fault(
        "rows_again_after_skip",
        "the rows of a skipped update are taken again, so the epoch's last ones never are",
        "common/run.py",
        replace("Run.next_update", "self.updates_seen", by="self.global_step"),
        f"{OVERFLOWS}[sft-2-2]",
    ),
]

# ============================================================ what a sample weighs
WEIGHTING = [
    Fault(
        "kto_divided_by_rows",
        "KTO's loss is divided by the number of rows, though a pair has two answers",
        "recipes/kto.py",
        replace(
            "main",
            "(losses * answer_weights).sum() * update.divisor / n_answers",
            by="(losses * answer_weights).sum() * update.divisor / update.n_samples",
        ),
        "models/test_preference_losses.py::test_a_pair_weighs_as_its_two_answers_do",
    ),
    Fault(
        "kto_kl_of_own_answers",
        "KTO's KL is that of each prompt with its own answer",
        "recipes/kto.py",
        replace("estimate_kl", "np.roll(rows, -1)[places]", by="rows[places]"),
        "models/test_preference_losses.py::test_kl_is_the_mean_over_all_answers_however_they_are_split",
    ),
    Fault(
        "loss_mean_of_means",
        "each micro-batch weighs the same, however many targets it has",
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() / token_weights.sum().clamp(min=1)",
        ),
        PROVED_SPLITS,
    ),
    Fault(
        "loss_summed",
        "the loss is summed over micro-batches, not averaged (axolotl 2004)",
        "recipes/dpo.py",
        replace(
            "main",
            "(losses * weights).sum() * update.divisor / update.n_samples",
            by="(losses * weights).mean() * update.divisor",
        ),
        "contracts/test_counting.py::test_accumulation_changes_no_number",
    ),
    Fault(
        "short_update_by_full_size",
        "the last update of an epoch is divided by the size of a full one",
        "recipes/reward.py",
        replace(
            "main",
            "(losses * weights).sum() * update.divisor / update.n_samples",
            by="(losses * weights).sum() * update.divisor / args.train_batch_size",
        ),
        REWARD_RUN,
    ),
    Fault(
        "divisor_forgotten",
        "the engine divides by the micro-batches and the loop does not multiply by them",
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() / n_targets",
        ),
        PROVED_SPLITS,
    ),
    Fault(
        "divisor_without_processes",
        "the gradients of several processes are averaged where they must be summed",
        "common/engine.py",
        replace(
            "begin_update",
            "len(micro_batches) * accelerator.num_processes",
            by="len(micro_batches)",
        ),
        REWARD_RUN,
    ),
    Fault(
        "padding_row_counted",
        "a process without rows counts its padding row",
        "common/batches.py",
        replace("micro_batch_of", "torch.zeros(1)", by="torch.ones(1)"),
        "data/test_data.py::test_a_window_is_dealt_out_exactly_once",
    ),
    Fault(
        "clipped_by_shard",
        "each process clips by the norm of what it holds",
        "recipes/sft.py",
        replace("main", "accelerator.clip_grad_norm_", by="torch.nn.utils.clip_grad_norm_"),
        f"{ALL_SPLITS}[zero1-2-sft]",
    ),
]

# ============================================================ what is logged
METRICS = [
    Fault(
        "metrics_of_rank_0",
        "the means are those of the first process alone (TRL, eight DPO metrics)",
        "common/metrics.py",
        replace(
            "Sums.reduce",
            "self.accelerator.gather(mine[None])",
            by="self.accelerator.gather(mine[None])[:1]",
        ),
        f"{TOKEN_MEANS}[ddp]",
    ),
    Fault(
        "metrics_mean_of_means",
        "a logged number is the mean of the micro-batches' means",
        "common/metrics.py",
        replace(
            "Sums.add",
            "torch.stack([number, weights.sum()])",
            by="torch.stack([number / weights.sum().clamp(min=1), weights.any().double()])",
        ),
        f"{TOKEN_MEANS}[plain]",
    ),
    Fault(
        "log_not_cut",
        "a resumed run keeps the lines that the killed one wrote after its checkpoint",
        "common/checkpoint.py",
        return_instead("same", "True"),
        "contracts/test_before_resume.py::test_going_back_gives_the_logs_and_sets_aside_what_came_after",
    ),
]

# ============================================================ which rows come next
ORDER = [
    Fault(
        "epochs_alike",
        "every epoch has the same order",
        "common/batches.py",
        replace("epoch_order", "np.append(seed, epoch)", by="seed"),
        "data/test_data.py::test_windows_are_a_permutation_of_each_epoch",
    ),
    Fault(
        "same_half",
        "a set of weight 0.5 has the same half of its rows in every epoch",
        "common/mixture.py",
        replace("rows_of_epoch", "epoch * count", by="0"),
        "data/test_mixing.py::test_half_of_a_set_and_the_other_half_in_the_next_epoch",
    ),
    Fault(
        "draw_by_process",
        "the responses of a rollout depend on the process that samples them",
        "recipes/ppo.py",
        replace(
            "make_rollout",
            "position.draw_uniforms(args, len(prompts_of_rollout['row']))",
            by="position.draw_uniforms(args, len(prompts_of_rollout['row']), "
            "run.accelerator.process_index)",
        ),
        f"{ALL_SPLITS}[ddp-tokens-ppo]",
    ),
]

# ============================================================ what a checkpoint holds
SAVING = [
    Fault(
        "random_states_lost",
        "a resumed run draws its dropout as if it had just begun",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            "self.load_schedule(state['scheduler'])",
            by="self.load_schedule(state['scheduler']); set_seed(0, device_specific=True)",
        ),
        RESTORED,
    ),
    Fault(
        "moments_lost",
        "a resumed run has a fresh optimizer and says nothing",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            'self.load_schedule(state["scheduler"])',
            by='self.load_schedule(state["scheduler"]); self.optimizer.state.clear()',
        ),
        RESTORED,
    ),
    Fault(
        "running_values_lost",
        "a resumed run forgets its rollout and its adapted KL coefficient",
        "common/checkpoint.py",
        drop_call("Checkpoint.load", "part.load_state"),
        RESTORED,
    ),
    Fault(
        "old_deleted_first",
        "the checkpoints before are deleted before the new one is written",
        "common/checkpoint.py",
        replace(
            "Checkpoint.save",
            "earlier = folders.by_step(self.folder)",
            by="earlier = folders.by_step(self.folder)\n"
            "for path in earlier: shutil.rmtree(path, ignore_errors=True)",
        ),
        "contracts/test_stopping.py::test_only_the_main_process_removes_what_failed",
    ),
    Fault(
        "checksum_not_compared",
        "a damaged file of the right size is taken for whole",
        "common/folders.py",
        replace("fault_of", "(found_size, found_crc) != (size, crc)", by="found_size != size"),
        "contracts/test_resume.py::test_damage_is_named_and_the_checkpoint_before_taken",
    ),
    Fault(
        "settings_not_compared",
        "a checkpoint of other data or other settings is resumed",
        "common/checkpoint.py",
        drop_call("Checkpoint.load", "self.refuse_another_run"),
        "contracts/test_resume.py::test_a_checkpoint_of_another_run_is_refused",
    ),
    Fault(
        "ids_not_keyed_by_source",
        "ids from the cache are of an older row function",
        "preference_recipes/data/conversion.py",
        return_instead("source_of", "inspect.getsource(function)"),
        "data/test_data.py::test_the_cache_knows_the_source_of_what_a_row_function_calls",
    ),
]

# ============================================================ models, shards, references
MODELS = [
    Fault(
        "actor_from_one_shard",
        "the saved actor holds one process's part of the weights",
        "common/actor.py",
        return_instead("gather_weights", "unwrapped.state_dict()"),
        # Not SFT's: without generation, DeepSpeed holds weights this small on every process.
        f"{ALL_SPLITS}[zero3-tokens-ppo]",
    ),
    Fault(
        "outside_of_the_engine",
        "log-probs are computed outside of the prepared model, so gradients are not summed",
        "recipes/sft.py",
        replace(
            "main",
            "token_losses(model, batch, args.loss_type)",
            by="token_losses(policy, batch)",
        ),
        PROVED_SPLITS,
    ),
    Fault(
        "half_buffers",
        "the rotary frequencies are rounded to half precision with the weights",
        "preference_recipes/models/prepare.py",
        replace("for_training", "exact_buffers(accelerator, model)", by="contextlib.nullcontext()"),
        "engines/test_strategies.py::test_buffers_are_not_rounded_with_the_weights",
    ),
    Fault(
        "any_reference_cached",
        "cached log-probs are taken for those of another reference",
        "preference_recipes/models/reference.py",
        replace(
            "Reference.precompute",
            "['reference', *identity, packer.share, rows.dataset._fingerprint]",
            by="['reference', packer.share, rows.dataset._fingerprint]",
        ),
        "contracts/test_metrics.py::test_reference_log_probs_are_computed_once",
    ),
    Fault(
        "dropout_left_on",
        "the policy that is trained drops out what the one that sampled did not",
        "recipes/ppo.py",
        drop_call("make_actor_critic", "prepare.disable_dropout"),
        PPO_RUN,
    ),
    Fault(
        "scale_grows_in_update",
        "DeepSpeed's loss scale grows within an update, which is then halved",
        "common/zero.py",
        drop("delay_scale_growth.update_scale", "scaler.cur_scale = before"),
        "contracts/test_fp16.py::test_no_update_is_halved_where_the_scale_grows[2]",
    ),
]

# ============================================================ tokens and masks
TOKENS = [
    Fault(
        "system_lost",
        "a system message that only the column prompt has is lost",
        "preference_recipes/data/formats.py",
        replace("join_prompts", "stated[:-length] + repeated", by="repeated"),
        "data/test_formats.py::test_nothing_of_a_prompt_is_lost_beside_conversations",
    ),
    Fault(
        "eos_dropped",
        "a plain answer has no end, so a model does not learn to stop",
        "preference_recipes/data/chat.py",
        replace("encode_plain", "ids if ids[-1:] == [eos] else [*ids, eos]", by="ids"),
        "data/test_data.py::test_plain_text_gets_bos_and_eos_once",
    ),
    Fault(
        "merged_boundary",
        "where prompt and answer merge into one token, a character is lost",
        "preference_recipes/data/chat.py",
        replace("encode_after", "both[:len(before_ids)] == before_ids", by="True"),
        "data/test_data.py::test_a_merge_over_the_boundary_loses_no_character",
    ),
    Fault(
        "rewritten_history_kept",
        "a later answer follows the earlier ones as they were learned, though the template rewrites them",
        "preference_recipes/data/chat.py",
        replace("encode_conversation", "answer.context[:len(ids)] == ids", by="True"),
        "data/test_templates.py::test_two_answers_without_thinking[qwen3]",
    ),
    Fault(
        "no_end_learned",
        "under a template without an end token nothing ends an answer",
        "preference_recipes/data/chat.py",
        replace("encode_turn", "not is_ended", by="False"),
        "data/test_templates.py::test_two_answers_without_thinking[glm4moe]",
    ),
    Fault(
        "thinking_dropped",
        "what the template drops of an answer is not learned",
        "preference_recipes/data/chat.py",
        return_instead("drops_thought", "False"),
        "data/test_templates.py::test_thinking_inside_the_content_is_learned_whole[deepseekv3]",
    ),
    Fault(
        "date_of_today",
        "a resumed run reads the date of the day on which it is resumed",
        "common/record.py",
        replace("find_date", "day is not None", by="False"),
        "data/test_sequences.py::test_the_date_is_that_of_the_newest_checkpoint",
    ),
    Fault(
        "sequences_lost",
        "of a conversation only the first sequence is trained on",
        "preference_recipes/data/sequences.py",
        replace(
            "of_rows",
            "np.arange(self._starts[row], self._starts[row + 1])",
            by="np.arange(self._starts[row], self._starts[row] + 1)",
        ),
        "data/test_sequences.py::test_the_first_update_by_hand",
    ),
    Fault(
        "answers_meet",
        "the answers to a shared prompt see each other",
        "preference_recipes/models/packing.py",
        replace(
            "attention_mask",
            "(key == query) | (key == prompt_of_query)",
            by="prompts[:, None, None, :] == prompt_of_query",
        ),
        PACKED,
    ),
    Fault(
        "softcap_ignored",
        "log-probs are of logits without the architecture's soft cap",
        "preference_recipes/models/architecture.py",
        replace("logits_formula", "result[..., 0].item() > 1000000.0", by="True"),
        "models/test_architectures.py::test_log_probs_and_gradients_are_those_of_its_own_logits[gemma2]",
    ),
    Fault(
        "tower_trained",
        "modules that text never reaches are given to the optimizer, whose decay shrinks them",
        "preference_recipes/models/architecture.py",
        drop_call("freeze_unreached", "parameter.requires_grad_"),
        "models/test_architectures.py::test_what_text_never_reaches_is_found[gemma3]",
    ),
]

# ============================================================ rollouts
ROLLOUTS = [
    Fault(
        "temperature_ignored",
        "the old log-probs are at another temperature than the responses were sampled at",
        "preference_recipes/rollouts/rollout.py",
        replace("compute_logps", "sampler.model(batch, temperature)", by="sampler.model(batch)"),
        PPO_RUN,
    ),
    Fault(
        "gae_over_padding",
        "the values after the end of a response count in its advantages",
        "recipes/ppo.py",
        drop("gae", "values = torch.where(mask, values, 0.0)"),
        "rollout/test_ppo.py::test_advantages[1.0-0.95]",
    ),
    Fault(
        "whitened_by_part",
        "advantages are whitened by response, not over the whole rollout",
        "recipes/ppo.py",
        replace(
            "make_rollout",
            "whiten(advantages, mask)",
            by="torch.stack([whiten(*row) for row in zip(advantages, mask)])",
        ),
        PPO_RUN,
    ),
    Fault(
        "grpo_ratio_of_rounding",
        "GRPO's first update compares with log-probs that another pass rounded",
        "recipes/grpo.py",
        replace(
            "sample_losses", "logps.detach()", by="stored.get('logps', stored['sampler_logps'])"
        ),
        f"{GRPO_RUN}[defaults]",
    ),
    Fault(
        "grpo_moved_by_a_skipped_update",
        "after an overflow GRPO takes the policy for one that has moved",
        "recipes/grpo.py",
        replace(
            "main", "run.global_step > state.rollout.started_at", by="state.position.update > 0"
        ),
        "contracts/test_fp16.py::test_until_an_update_is_applied_the_policy_has_not_moved",
    ),
    Fault(
        "grpo_tokens_divided_by_samples",
        "GRPO's mean over tokens is divided by the number of samples",
        "recipes/grpo.py",
        replace("total_weight", "average == 'token'", by="False"),
        f"{GRPO_RUN}[defaults]",
    ),
    Fault(
        "grpo_kl_without_ratio",
        "GRPO's KL is not weighted by the ratio",
        "recipes/grpo.py",
        replace("kl_losses", "kl * ratios", by="kl"),
        "rollout/test_grpo_values.py::test_the_kl_terms_have_the_gradient_of_the_kl_at_any_ratio",
    ),
    Fault(
        "prefill_of_the_first",
        "all responses of a batch begin with the cache of its first prompts",
        "preference_recipes/rollouts/generation.py",
        replace(
            "Rows.read_prompts",
            "torch.tensor(copies)",
            by="torch.tensor(copies) * 0",
        ),
        f"{SHARED_PREFILL}[4-llama]",
    ),
    Fault(
        "groups_split",
        "the responses to a prompt are scored on different processes",
        "preference_recipes/rollouts/samples.py",
        replace(
            "share_of_groups",
            "np.arange(n_prompts * per_prompt).reshape(-1, per_prompt)",
            by="np.arange(n_prompts * per_prompt).reshape(-1, 1)",
        ),
        "rollout/test_rewards.py::test_a_prompts_samples_are_never_split_between_processes[4]",
    ),
    Fault(
        "none_counts_as_zero",
        "a function that says nothing of a response gives it 0",
        "preference_recipes/rollouts/reward_calls.py",
        replace("check", "math.nan if value is None else float(value)", by="float(value or 0)"),
        "rollout/test_rewards.py::test_the_total_is_the_weighted_sum_of_the_parts_that_are_there",
    ),
    Fault(
        "functions_share_lists",
        "what a reward function changes reaches the samples that are trained on",
        "preference_recipes/rollouts/reward_calls.py",
        replace("call", "copy.deepcopy", by="tuple"),
        "rollout/test_rewards.py::test_what_a_function_changes_reaches_neither_the_samples_nor_the_next_function",
    ),
    Fault(
        "weights_of_rewards_ignored",
        "each reward counts once, whatever its weight",
        "preference_recipes/rollouts/rewards.py",
        replace("score", "values * weights", by="values"),
        "rollout/test_rewards.py::test_the_total_is_the_weighted_sum_of_the_parts_that_are_there",
    ),
    Fault(
        "distill_tokens_divided_by_samples",
        "distillation's mean over tokens is divided by the number of samples",
        "recipes/distill.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / response_tokens",
            by="(losses * token_weights).sum() * update.divisor / update.n_samples",
        ),
        f"{DISTILL_RUN}[reverse kl]",
    ),
    Fault(
        "distill_share_by_place",
        "which prompts a student answers depends on the prompts beside them",
        "recipes/distill.py",
        replace(
            "answered_by_student",
            "[args.seed, place, SHARE_STREAM]",
            by="[args.seed, place - places[0], SHARE_STREAM]",
        ),
        "rollout/test_distill.py::test_the_share_of_prompts_that_the_student_answers",
    ),
    Fault(
        "distill_prompt_of_student",
        "a teacher reads the student's prompt where another was given",
        "recipes/distill.py",
        replace("rollout_of", "'teacher_prompt_ids'", by="'prompt_ids'"),
        f"{DISTILL_RUN}[several teachers, other prompts, completions]",
    ),
    Fault(
        "distill_ratio_of_moved_student",
        "sampled tokens of later updates are compared with the student as it is now",
        "recipes/distill.py",
        replace("main", "run.global_step > rollout.started_at", by="False"),
        f"{DISTILL_RUN}[sampled tokens]",
    ),
    Fault(
        "distill_gradient_of_one_side",
        "the divergence's gradient lacks the mean that keeps probabilities adding up to one",
        "preference_recipes/models/divergence.py",
        replace("gradient", "gap.sub_(mean)", by="gap"),
        "rollout/test_divergence.py::test_values_and_gradients_are_those_of_plain_fp64",
    ),
    Fault(
        "evaluation_draws_anew",
        "each evaluation draws by other numbers, so its curves do not compare",
        "preference_recipes/rollouts/evaluation.py",
        replace("sample_held_out", "EVALUATION_STREAM", by="run.progress.global_step"),
        "rollout/test_ppo.py::test_evaluation_by_sampling",
    ),
    Fault(
        "critic_is_the_actor",
        "what is saved as the critic is the actor",
        "common/actor.py",
        replace(
            "Actor.write_into",
            "weights_of(model, weights, self.unwrapped)",
            by="weights_of(self.unwrapped.model, weights, self.unwrapped)",
        ),
        "rollout/test_ppo.py::test_the_critic_is_taken_out_of_a_checkpoint[kl in the reward plain]",
    ),
]

FAULTS = [*COUNTING, *WEIGHTING, *METRICS, *ORDER, *SAVING, *MODELS, *TOKENS, *ROLLOUTS]


# ============================================================ planting
@cache
def source(file: str) -> str:
    return (REPOSITORY / file).read_text(encoding="utf-8")


@cache
def without_comments(file: str) -> str:
    """The file as Python writes its syntax tree: what a fault is compared with."""
    return ast.unparse(ast.parse(source(file)))


def with_fault(fault: Fault) -> ast.Module:
    """The file of a fault with the fault in it.

    Raises:
        Misfit: the code has changed, so that the fault no longer fits.
    """
    tree = ast.parse(source(fault.file))
    fault.plant(tree)
    return ast.fix_missing_locations(tree)


# ============================================================ running
class Outcome(NamedTuple):
    """What became of some tests: `green`, `red` or `error`; why; and what pytest printed."""

    kind: str
    reason: str
    output: str


# A failure outside of a test, or one of the planted code's own spelling.
NOT_A_FAILED_TEST = re.compile(
    r"^ERROR tests/|^E\s+(\[rank\d\]: )?(Syntax|Name|Import|ModuleNotFound)Error", re.MULTILINE
)


def run_tests(folder: Path, tests: list[str]) -> Outcome:
    """Runs tests of the copy in `folder`."""
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
        return Outcome("green", "", output)
    if result.returncode != 1 or NOT_A_FAILED_TEST.search(output):
        return Outcome("error", "", output)
    reason = re.search(r"^E\s+(.*)", output, re.MULTILINE)
    return Outcome("red", reason[1][:80] if reason else "", output)


def copy_repository(to: Path) -> None:
    """Copies the files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to / name)


def choose(names: list[str]) -> list[Fault]:
    """The faults of these names, all without any; exits if one is unknown or no longer fits."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        sys.exit(f"no such fault: {' '.join(sorted(unknown))}")
    misfits = []
    for fault in FAULTS:
        try:
            with_fault(fault)
        except Misfit as misfit:
            misfits.append(f"{fault.name} no longer fits {fault.file}: {misfit}")
    if misfits:
        sys.exit("\n".join(misfits))
    return [fault for fault in FAULTS if not names or fault.name in names]


def write_without_fault(copy: Path, file: str) -> None:
    """The comments go here too, so that only a fault can make a difference."""
    (copy / file).write_text(without_comments(file), encoding="utf-8")


def try_fault(folder: Path, fault: Fault) -> bool:
    """Plants a fault into the copy in `folder`, runs its test and prints what became of it.

    Returns:
        whether the test noticed. The copy is without the fault again.
    """
    start = time.time()
    copy = folder / "copy"
    (copy / fault.file).write_text(ast.unparse(with_fault(fault)), encoding="utf-8")
    outcome = run_tests(folder, [fault.test])
    write_without_fault(copy, fault.file)

    is_red = outcome.kind == "red"
    kind = {"red": "red", "green": "STILL GREEN", "error": "ERROR"}[outcome.kind]
    after = outcome.reason if is_red else f"{fault.breaks}; {fault.test}"
    print(f"{kind:12} {fault.name:27} {time.time() - start:4.0f} s  {after}", flush=True)
    if not is_red:
        print(outcome.output[-3000:], flush=True)
    return is_red


def main(names: list[str]) -> None:
    faults = choose(names)
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = Path(temporary)
        copy_repository(folder / "copy")
        for fault in faults:
            write_without_fault(folder / "copy", fault.file)
        outcome = run_tests(folder, sorted({fault.test for fault in faults}))
        print(f"without a fault: {outcome.kind}", flush=True)
        if outcome.kind != "green":
            sys.exit(outcome.output)
        noticed = sum(try_fault(folder, fault) for fault in faults)
    print(f"{noticed} of {len(faults)} faults make their tests fail")
    sys.exit(noticed < len(faults))


if __name__ == "__main__":
    main(sys.argv[1:])
