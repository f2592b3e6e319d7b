"""Shows that the tests notice: each mutation that a test file's docstring names must turn the tests named here red.

    python tests/mutations.py             all of them
    python tests/mutations.py NAME ...    those of these names

Works on a temporary copy of the files that git does not ignore. First all the tests named must be green there without any mutation. A mutation is
red if a test fails, none has an error outside of the test itself, and what fails is not the mutated file's syntax or names.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`, and `test` (a pytest node below tests/) goes red."""

    name: str
    file: str
    old: str
    new: str
    test: str


# fmt: off
MUTATIONS = [
    # ------------------------------------------------------------ test_bad_input.py
    Mutation("silent_rounding", "common/arguments.py", "if train_batch_size % samples_per_step == 0:", "if train_batch_size >= samples_per_step:",
             "test_bad_input.py::test_sizes_that_do_not_divide"),
    Mutation("abbreviations", "common/arguments.py", "allow_abbrev=False", "allow_abbrev=True", "test_bad_input.py::test_flags"),
    Mutation("unknown_argument", "common/arguments.py", "    if unknown:\n", "    if False:\n",
             "test_bad_input.py::test_flags"),
    Mutation("yaml_wins", "common/arguments.py", "yaml_to_flags(argv[0], parser) + argv[1:]", "argv[1:] + yaml_to_flags(argv[0], parser)",
             "test_bad_input.py::test_yaml_of_defaults"),
    Mutation("row_from_zero", "common/data/dataset.py", "row {index + 1}: {error}", "row {index}: {error}",
             "test_bad_input.py::test_rows_that_do_not_fit"),
    Mutation("no_line", "common/data/files.py", "            find_malformed_json(file)", "            pass",
             "test_bad_input.py::test_files_that_cannot_be_read"),
    Mutation("reader_traceback", "common/data/files.py", "except Exception as error:  # each reader", "except OSError as error:  # each reader",
             "test_bad_input.py::test_files_that_cannot_be_read"),
    Mutation("rank_leaves", "common/launch.py", "result, problem = None, error.code", "raise",
             "test_bad_input.py::test_recipes_end_with_one_line_and_before_training"),
    Mutation("output_reused", "common/launch.py", "path.is_dir() and any(path.iterdir()):", "path.is_file():",
             "test_bad_input.py::test_recipes_end_with_one_line_and_before_training"),
    Mutation("small_vocabulary", "common/models/load.py", "if text_tokens > config.vocab_size:", "if False:", "test_bad_input.py::test_models"),
    Mutation("image_counted", "common/models/load.py", ' - hasattr(tokenizer, "image_token")', "",
             "test_bad_input.py::test_a_text_model_may_have_the_tokenizer_of_one_that_knows_images"),
    Mutation("no_tokens_asked", "common/arguments.py", 'if getattr(args, "max_new_tokens", 1) < 1:', "if False:", "test_bad_input.py::test_intervals"),
    Mutation("random_weights", "common/models/load.py", "    if missing:\n        sys.exit(", "    if False:\n        sys.exit(", "test_bad_input.py::test_models"),
    # ------------------------------------------------------------ test_configs.py
    Mutation("beaten_key", "accelerate_configs/multi_node.yaml", "main_process_port: 29500\n", "main_process_port: 29500\nrdzv_backend: c10d\n",
             "test_configs.py::test_accelerate_reads_every_key_of_a_yaml[multi_node]"),
    Mutation("unread_key", "accelerate_configs/fsdp2.yaml", "  fsdp_version: 2\n", "  fsdp_version: 2\n  fsdp_mixed_precision: bf16\n",
             "test_configs.py::test_accelerate_reads_every_key_of_a_yaml[fsdp2]"),
    Mutation("unread_json", "accelerate_configs/ds_zero1.json", '"gradient_clipping": "auto"', '"gradient_clipping": "auto", "gradient_checkpointing": true',
             "test_configs.py::test_deepspeed_knows_every_key_of_a_json[ds_zero1]"),
    Mutation("unknown_json", "accelerate_configs/ds_zero1.json", '{"stage": 1}', '{"stage": 1, "overlap": true}',
             "test_configs.py::test_deepspeed_knows_every_key_of_a_json[ds_zero1]"),
    Mutation("not_offloaded", "accelerate_configs/ds_zero3_offload.json", '"offload_optimizer": {"device": "cpu"', '"offload_optimizer": {"device": "none"',
             "test_configs.py::test_a_yaml_as_it_is_gives_the_numbers_of_fp32[ds_zero3_offload]"),
    Mutation("silent_lock", "common/zero.py", 'in ("cpu", "nvme"):', 'in ("nvme",):',
             "test_configs.py::test_a_yaml_as_it_is_gives_the_numbers_of_fp32[ds_zero3_offload]"),
    Mutation("false_warning", "common/zero.py", '"ignore", "Detected call', '"ignore", "No call',
             "test_configs.py::test_a_yaml_as_it_is_gives_the_numbers_of_fp32[ds_zero3_offload]"),
    Mutation("rounded_actor", "common/checkpoint.py", 'value for name, value in weights.items() if name.startswith("model.")',
             'value.bfloat16().to(value.dtype) for name, value in weights.items() if name.startswith("model.")',
             "test_configs.py::test_a_yaml_as_it_is_gives_the_numbers_of_fp32[ds_zero1_fp16]"),
    # ------------------------------------------------------------ test_counting.py
    Mutation("log_every_ga", "recipes/dpo.py", "progress.log_due(args.logging_steps)", "progress.log_due(args.logging_steps * len(micro_batches))",
             "test_counting.py::test_accumulation_changes_no_number"),
    Mutation("floor_updates", "common/progress.py", "math.ceil(self.n_rows / self.train_batch_size)", "self.n_rows // self.train_batch_size",
             "test_counting.py::test_log_lines_stand_at_the_first_the_multiples_and_the_last"),
    Mutation("loss_summed", "recipes/dpo.py", "(losses * weights).sum() * divisor / len(update_rows)", "(losses * weights).mean() * divisor",
             "test_counting.py::test_accumulation_changes_no_number"),
    Mutation("skip_counted", "common/progress.py", "            self.skipped_steps += 1\n", "            self.skipped_steps += 1\n            self.global_step += 1\n",
             "test_counting.py::test_an_epoch_ends_with_its_data_and_max_steps_counts_applied_updates"),
    Mutation("skip_sums", "common/metrics.py", "        self.pending.sums = {}", "        self.pending.sums = {} if applied else self.pending.sums",
             "test_counting.py::test_a_skipped_update_leaves_no_trace"),
    # ------------------------------------------------------------ test_data.py
    Mutation("no_eos", "common/data/tokens.py", "if pieces[-1][-1:] != eos:", "if not pieces[-1]:",
             "test_data.py::test_plain_text_gets_bos_and_eos_once"),
    Mutation("double_bos", "common/data/tokens.py", "if puts_bos_in_front and whole[:1] != bos:", "if puts_bos_in_front:",
             "test_data.py::test_plain_text_gets_bos_and_eos_once"),
    Mutation("eos_ends_turns", "common/data/tokens.py", "token is not None and token.special", "False",
             "test_data.py::test_a_turn_ends_where_its_template_ends_it"),
    Mutation("not_aligned", "common/models/load.py", "    model.generation_config.eos_token_id = sorted(tokens.stop_tokens(tokenizer, model))", "    model.generation_config",
             "test_data.py::test_a_turn_ends_where_its_template_ends_it"),
    Mutation("newline_learned", "common/data/tokens.py",
             "return len(ids) - ids[::-1].index(eos)", "return len(ids)",
             "test_data.py::test_targets_of_a_conversation"),
    Mutation("every_turn", "recipes/sft.py", 'turns[-1:] if loss_on == "completion" else turns', "turns",
             "test_data.py::test_targets_of_a_conversation"),
    Mutation("merged_boundary", "common/data/tokens.py", "if whole[: len(ids_so_far)] == ids_so_far:", "if True:",
             "test_data.py::test_a_merge_over_the_boundary_loses_no_character"),
    Mutation("prompt_twice", "common/data/formats.py", 'if has_prompt and (not chosen or chosen[0]["role"] == "assistant"):', "if has_prompt:",
             "test_data.py::test_a_prompt_inside_message_lists_is_stated_once"),
    Mutation("hh_first_turn", "common/data/formats.py", "shared.rindex(HH_MARKER)", "shared.index(HH_MARKER)", "test_data.py::test_hh_rlhf_transcripts"),
    Mutation("untyped_lists", "common/data/dataset.py", "value = np.array(value, dtype=bool if column_name in BOOLEAN_COLUMNS else int)", "pass",
             "test_data.py::test_rows_may_begin_with_a_thousand_empty_lists"),
    Mutation("equal_after_cut", "common/data/pairs.py", "if not reason and chosen_ids == rejected_ids:", "if not reason and chosen == rejected:",
             "test_data.py::test_truncation_and_rows_left_out"),
    Mutation("wrong_reason", "common/data/pairs.py", '"chosen equal to rejected" if room else "prompt fills max_length"',
             '"prompt fills max_length" if room else "chosen equal to rejected"', "test_data.py::test_truncation_and_rows_left_out"),
    Mutation("csv_numbers", "common/data/files.py", '        "features": datasets.Features(dict.fromkeys(header, datasets.Value("string"))),\n', "",
             "test_data.py::test_every_file_kind_gives_the_same_rows"),
    Mutation("calls_not_learned", "common/data/formats.py", 'message["content"] or message.get("tool_calls") for', 'message["content"] for',
             "test_data.py::test_a_tool_call_is_learned_though_it_has_no_text"),
    Mutation("tools_unseen", "common/data/tokens.py", "            schemas,\n", "            None,\n",
             "test_data.py::test_tools_are_rendered_without_the_keys_of_other_rows"),
    Mutation("nulls_below", "common/data/formats.py", "for key, part in parts.items() if part is not None}", "for key, part in parts.items()}",
             "test_data.py::test_tools_are_rendered_without_the_keys_of_other_rows"),
    Mutation("content_asked", "common/data/formats.py", ' or (content is None and bool(value.get("tool_calls")))', "",
             "test_data.py::test_tools_are_rendered_without_the_keys_of_other_rows"),
    Mutation("nothing_asked", "common/data/dataset.py", 'row["answer"] is None or nothing_asked', 'row["answer"] is None',
             "test_data.py::test_without_a_prompt_there_is_nothing_to_answer"),
    Mutation("stale_tokenizer", "common/data/dataset.py", "        tokens.fingerprint(tokenizer),\n", "",
             "test_data.py::test_tokenised_once_and_again_when_anything_changes"),
    Mutation("stale_settings", "common/data/dataset.py", "        columns,\n        settings,\n", "        columns,\n",
             "test_data.py::test_tokenised_once_and_again_when_anything_changes"),
    Mutation("same_epochs", "common/batches.py", "default_rng(np.append(seed, epoch))", "default_rng(seed)",
             "test_data.py::test_windows_are_a_permutation_of_each_epoch"),
    Mutation("filler_weight", "common/batches.py", "torch.zeros(1)", "torch.ones(1)",
             "test_data.py::test_a_window_is_dealt_out_exactly_once"),
    Mutation("uneven_processes", "common/batches.py", "np.array_split(longest_first, steps * processes)",
             "np.array_split(longest_first, math.ceil(len(rows) / micro_batch_size))", "test_data.py::test_a_window_is_dealt_out_exactly_once"),
    # ------------------------------------------------------------ test_docs.py
    Mutation("renamed_tag", "recipes/dpo.py", '"logps/chosen": chosen', '"logps_chosen": chosen',
             "test_docs.py::test_the_glossary_is_the_list_of_logged_tags[dpo]"),
    Mutation("other_curves", "common/metrics.py", "self.board.add_scalar(name, value, self.progress.global_step)",
             "self.board.add_scalar(name, value, self.progress.global_step + 1)",
             "test_docs.py::test_tensorboard_holds_what_metrics_jsonl_holds[sft]"),
    # ------------------------------------------------------------ test_fp16.py
    Mutation("grows_within", "common/zero.py", "            scaler.grown = scaler.cur_scale\n            scaler.cur_scale = before", "            pass",
             "test_fp16.py::test_no_update_is_halved_where_the_scale_grows[2]"),
    Mutation("no_end", "common/guards.py", "self.MANY if can_fall else 2", "self.MANY",
             "test_fp16.py::test_skips_without_end_end"),
    Mutation("no_warning", "common/guards.py", "recent <= self.A_TENTH or", "recent <= RECENT_UPDATES or", "test_fp16.py::test_skips_without_end_end"),
    Mutation("warns_always", "common/guards.py", "        self.last_warning = progress.updates_seen\n", "",
             "test_fp16.py::test_a_run_that_skips_too_often_is_warned_and_one_without_remedy_ends"),
    Mutation("forward_only", "common/engine.py", "if tensor.requires_grad:", "if False:", "test_fp16.py::test_the_tensor_that_overflows_is_named"),
    Mutation("half_logits", "common/models/logprobs.py", "hidden.to(matrix.dtype) @ matrix.T\n", "(hidden.to(matrix.dtype) @ matrix.T).half()\n",
             "test_fp16.py::test_what_a_half_model_returns_is_computed_in_fp32"),
    Mutation("half_margins", "recipes/reward.py", "-F.logsigmoid(chosen - rejected - margins)", "-F.logsigmoid((chosen - rejected - margins).half()).float()",
             "test_fp16.py::test_losses_of_values_that_fp16_cannot_hold"),
    # ------------------------------------------------------------ test_invariance.py
    Mutation("window_mean", "recipes/sft.py", "(losses * token_weights).sum() * divisor / int(targets[window].sum())",
             "(losses * token_weights).sum() / token_weights.sum().clamp(min=1)",
             "test_invariance.py::test_every_split_is_the_same_run[plain-4-sft]"),
    Mutation("filler_weight", "common/batches.py", "torch.zeros(1)", "torch.ones(1)",
             "test_invariance.py::test_every_split_is_the_same_run[ddp-2-sft]"),
    Mutation("no_clip", "recipes/sft.py", "accelerator.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_(",
             "test_invariance.py::test_every_split_is_the_same_run[zero1-2-sft]"),
    Mutation("rank0_metrics", "common/metrics.py", "self.accelerator.gather(mine)", "self.accelerator.gather(mine)[:1]",
             "test_invariance.py::test_every_split_is_the_same_run[ddp-2-sft]"),
    Mutation("fixed_accumulation", "common/engine.py", "    accelerator.step = 0\n    accelerator.gradient_accumulation_steps = len(micro_batches)\n", "",
             "test_invariance.py::test_every_split_is_the_same_run[plain-tokens-sft]"),
    Mutation("no_accumulation", "recipes/sft.py", ".sum() * divisor / int(", ".sum() * accelerator.num_processes / int(",
             "test_invariance.py::test_every_split_is_the_same_run[plain-4-sft]"),
    Mutation("draw_by_process", "recipes/ppo.py", "[args.seed, number, 1]", "[args.seed, number, accelerator.process_index]",
             "test_invariance.py::test_every_split_is_the_same_run[ddp-tokens-ppo]"),
    Mutation("shard_norms", "common/engine.py", "accelerator.reduce(table).sqrt()", "table.sqrt()",
             "test_invariance.py::test_every_split_is_the_same_run[zero2-tokens-ppo]"),
    Mutation("compiled_names", "common/checkpoint.py", "if zero_stage(accelerator) == 3 or accelerator.is_fsdp2 else unwrapped.state_dict()",
             "", "test_invariance.py::test_every_split_is_the_same_run[compiled-4-ppo]"),
    # ------------------------------------------------------------ test_launch.py
    Mutation("ds_clip", "common/zero.py", '    fill_in(config, "gradient_clipping", float(args.max_grad_norm))\n', "",
             "test_launch.py::test_one_argument_rules_the_clipping[zero2]"),
    Mutation("uphill", "recipes/sft.py", "max(args.max_grad_norm, 0) or math.inf", "args.max_grad_norm or math.inf",
             "test_launch.py::test_one_argument_rules_the_clipping[plain]"),
    Mutation("all_actors", "recipes/sft.py", "save_actor(accelerator, model, actor, tokenizer, folder, args.save_actor_limit)",
             "save_actor(accelerator, model, actor, tokenizer, folder)", "test_launch.py::test_where_a_run_goes_by_itself_and_what_it_keeps"),
    Mutation("unseen_folder", "common/launch.py", "if not all(gather_object([Path(args.output_dir).is_dir()])):", "if not Path(args.output_dir).is_dir():",
             "test_launch.py::test_an_output_dir_that_a_process_does_not_see_is_refused"),
    Mutation("same_second", "common/launch.py", "exist_ok=bool(args.output_dir) or continues)", "exist_ok=True)",
             "test_launch.py::test_runs_of_the_same_second_do_not_share_a_folder"),
    Mutation("cwd_json", "common/zero.py", "in (Path(path), REPOSITORY / path) if", "in (Path(path),) if",
             "test_launch.py::test_a_copy_of_a_recipe_runs_from_any_directory_with_the_yaml_of_the_repository"),
    Mutation("any_common", "common/__init__.py", "and clone != REPOSITORY:", "and REPOSITORY is None:",
             "test_launch.py::test_another_common_is_refused"),
    Mutation("foreign_common", "recipes/sft.py", 'if not hasattr(common, "check_recipe"):', "if False:",
             "test_launch.py::test_somebody_elses_common_is_named[package]"),
    Mutation("no_nan_check", "recipes/sft.py", "check_finite(seen, progress, args.output_dir)", "pass",
             "test_launch.py::test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rows[plain]"),
    Mutation("no_clip", "recipes/sft.py", "max(args.max_grad_norm, 0) or math.inf", "math.inf",
             "test_launch.py::test_one_argument_rules_the_clipping[plain]"),
    # ------------------------------------------------------------ test_logprobs.py
    Mutation("rounded_products", "common/cpu.py", "if product.min() > 1:", "if product.min() > 0:",
             "test_logprobs.py::test_a_cpu_that_rounds_keeps_its_products"),
    Mutation("small_products", "common/models/load.py", "config.hidden_size > 128:", "True:",
             "test_logprobs.py::test_products_of_a_wide_model_are_fp32"),
    Mutation("short_flash", "common/cpu.py", "if query.shape[2] < 256:", "if query.shape[2] < 0:",
             "test_logprobs.py::test_attention_of_short_rows_is_attention[False-40]"),
    Mutation("no_softcap", "common/models/logprobs.py", 'getattr(config, "final_logit_softcapping", None) or 0.0', "0.0",
             "test_logprobs.py::test_architectures[gemma2]"),
    Mutation("no_multiplier", "common/models/logprobs.py", 'getattr(config, "logit_scale", None) or 1.0', "1.0",
             "test_logprobs.py::test_architectures[cohere]"),
    Mutation("half_softmax", "common/models/logprobs.py", "hidden.to(matrix.dtype) @ matrix.T\n", "(hidden.to(matrix.dtype) @ matrix.T).to(hidden.dtype)\n",
             "test_logprobs.py::test_log_softmax_is_fp32_under_half_weights"),
    Mutation("answers_meet", "common/models/packing.py", "(key == query) | (key == prompt_of_query)",
             "prompts[:, None, None, :] == prompt_of_query",
             "test_logprobs.py::test_packed_answers_are_read_as_each_alone[llama]"),
    Mutation("row_positions", "common/models/packing.py", "np.arange(end - start) + piece.position", "np.arange(start, end)",
             "test_logprobs.py::test_packed_answers_are_read_as_each_alone[llama]"),
    Mutation("wrong_neighbour", "common/models/packing.py", "[last_of_prompt, *places[:-1]]", "[max(places[0] - 1, 0), *places[:-1]]",
             "test_logprobs.py::test_packed_answers_are_read_as_each_alone[llama]"),
    Mutation("last_chunk", "common/models/logprobs.py", "grad_weight += grad.T @", "grad_weight = grad.T @", "test_logprobs.py::test_architectures[llama]"),
    Mutation("kept_twice", "common/models/logprobs.py", "logits, all_logps = kept\n            kept = None\n", "logits, all_logps = (t if t is None else t.clone() for t in kept)\n", "test_logprobs.py::test_architectures[llama]"),
    Mutation("half_sum", "common/models/logprobs.py", "log_softmax(-1, dtype=torch.float32)", "log_softmax(-1).float()",
             "test_logprobs.py::test_the_head_under_half_precision"),
    Mutation("chunks_packed", "common/models/checks.py", '("sliding_window", "attention_chunk_size")', '("sliding_window",)',
             "test_logprobs.py::test_attention_of_a_part_of_longer_rows_is_not_packed[attention_chunk_size]"),
    Mutation("jitter_left", "common/models/prepare.py", '"drop" in name or "jitter" in name', '"drop" in name', "test_logprobs.py::test_what_is_compared_meets_no_noise"),
    # ------------------------------------------------------------ test_memory.py
    Mutation("no_step_copies", "common/memory.py", '        trained += [State("fp32 gradients", 4, True, "s")]\n', '',
             "test_memory.py::test_the_estimate_is_what_two_processes_hold[ds_fp16]"),
    Mutation("no_buckets", "common/memory.py", 'State("DDP\'s buckets", 4, False)', 'State("DDP\'s buckets", 0, False)',
             "test_memory.py::test_the_estimate_is_what_two_processes_hold[ddp]"),
    Mutation("masters_stay", "common/memory.py", 'State("fp32 masters", 4, True, where=optimizer)', 'State("fp32 masters", 4, True)',
             "test_memory.py::test_offload"),
    Mutation("tied_twice", "common/memory.py", "for p in module.parameters())", "for _, p in module.named_parameters(remove_duplicate=False))",
             "test_memory.py::test_parameters_are_counted_without_weights"),
    Mutation("default_bucket", "common/memory.py", 'bucket = -1 if zero.get("reduce_bucket_size") == "auto" else', 'bucket = int(5e8) if zero.get("reduce_bucket_size") == "auto" else',
             "test_memory.py::test_an_automatic_bucket_is_the_square_of_the_hidden_size"),
    # ------------------------------------------------------------ test_metrics.py
    Mutation("one_peak", "common/metrics.py", "/ (peak_of_one * self.accelerator.num_processes)", "/ peak_of_one",
             "test_metrics.py::test_the_share_of_the_gpu_that_is_used"),
    Mutation("rank0_metrics", "common/metrics.py", "self.accelerator.gather(mine)", "self.accelerator.gather(mine)[:1]",
             "test_metrics.py::test_the_token_means_of_sft[ddp]"),
    Mutation("mean_of_means", "common/metrics.py", "torch.stack([total, weights.sum(), ",
             "torch.stack([total / weights.sum().clamp(min=1), weights.any().double(), ",
             "test_metrics.py::test_the_token_means_of_sft[plain]"),
    Mutation("filler_weight", "common/batches.py", "torch.zeros(1)", "torch.ones(1)",
             "test_metrics.py::test_the_token_means_of_sft[ddp]"),
    Mutation("weak_accuracy", "recipes/dpo.py", "(chosen_rewards > rejected_rewards)", "(chosen_rewards >= rejected_rewards)",
             "test_metrics.py::test_equal_rewards_are_no_success"),
    Mutation("logits_per_pair", "recipes/dpo.py", '({"logits/chosen": chosen_logits}, chosen_mask * weights[:, None])',
             '({"logits/chosen": (chosen_logits * chosen_mask).sum(1) / chosen_mask.sum(1)}, weights)', "test_metrics.py::test_the_eight_metrics_of_dpo[plain-more0]"),
    # ------------------------------------------------------------ test_nodes.py
    Mutation("pdsh", "accelerate_configs/ds_zero2.yaml", "deepspeed_multinode_launcher: standard", "deepspeed_multinode_launcher: pdsh",
             "test_nodes.py::test_deepspeed_on_two_nodes"),
    Mutation("too_many", "accelerate_configs/slurm.sh", '"$((per_node * SLURM_NNODES))"', '"$((per_node * 2 * SLURM_NNODES))"',
             "test_nodes.py::test_the_slurm_script_runs_two_nodes_and_goes_back_into_the_queue"),
    Mutation("no_requeue", "accelerate_configs/slurm.sh", 'scontrol requeue "$SLURM_JOB_ID"', ":",
             "test_nodes.py::test_the_slurm_script_runs_two_nodes_and_goes_back_into_the_queue"),
    # ------------------------------------------------------------ test_ppo.py
    Mutation("values_forgotten", "recipes/ppo.py", 'torch.where(mask, advantages + values, 0.0)',
             'torch.where(mask, advantages, 0.0)', "test_ppo.py::test_advantages[1.0-0.95]"),
    Mutation("whiten_rows", "recipes/ppo.py", '"advantages": whiten(advantages, mask)',
             '"advantages": torch.cat([whiten(a[None], m[None]) for a, m in zip(advantages, mask)])', "test_ppo.py::test_what_a_rollout_holds[kl in the reward plain]"),
    Mutation("score_on_first", "recipes/ppo.py", '== mask.sum(1, keepdim=True) - 1',
             '== 0 * mask.sum(1, keepdim=True)', "test_ppo.py::test_token_rewards"),
    Mutation("one_clip", "recipes/ppo.py", 'ratios.clamp(1 - clip_low, 1 + clip_high)',
             'ratios.clamp(1 - clip_low, 1 + clip_low)', "test_ppo.py::test_policy_losses[0.1-0.4-0.0]"),
    Mutation("rounding_clipped", "recipes/ppo.py", "values.clamp(old_values - clip, old_values + clip)", "old_values + (values - old_values).clamp(-clip, clip)",
             "test_ppo.py::test_value_losses[0.2]"),
    Mutation("value_not_halved", "recipes/ppo.py", 'torch.maximum(free, clipped) / 2, clipped > free',
             'torch.maximum(free, clipped), clipped > free', "test_ppo.py::test_value_losses[0.2]"),
    Mutation("cold_logps", "recipes/ppo.py", 'found = model(batch, args.temperature)',
             'found = model(batch)', "test_ppo.py::test_what_a_rollout_holds[kl in the reward plain]"),
    Mutation("eos_only", "common/models.py", '*([own] if isinstance(own, int) else own or []), ', '', "test_ppo.py::test_generation_is_that_of_each_prompt_alone[llama]"),
    Mutation("draw_left", "common/generation.py", 'cumulative[:, -1:], right=True)',
             'cumulative[:, -1:])', "test_ppo.py::test_sampling_is_the_inverse_of_the_cumulative_probability"),
    Mutation("mark_ignored", "common/generation.py", "    return end(response) == end(answer)", '    return response.strip() == end(answer)',
             "test_ppo.py::test_a_response_is_right_where_it_ends_as_the_answer"),
    Mutation("thought_counts", "common/generation.py", '.split("</think>")[-1]', "", "test_ppo.py::test_a_response_is_right_where_it_ends_as_the_answer"),
    Mutation("floats_differ", "common/generation.py", '.removesuffix(".0")', "", "test_ppo.py::test_a_response_is_right_where_it_ends_as_the_answer"),
    Mutation("given_twice", "recipes/ppo.py", 'rest[0].keys() - {"prompts", "responses"}', "rest[0].keys()",
             "test_ppo.py::test_a_score_is_model_plus_function_clipped_less_the_penalty"),
    Mutation("wrong_signs", "recipes/ppo.py", "args.kl_target < 0 or args.reward_clip < 0", "False",
             "test_ppo.py::test_settings_that_would_be_ignored_or_cannot_work"),
    Mutation("rows_stay", "common/generation.py", "out.past_key_values.reorder_cache(torch.tensor(going))", "pass",
             "test_ppo.py::test_generation_is_that_of_each_prompt_alone[llama]"),
    Mutation("draw_by_place", "common/generation.py", 'torch.from_numpy(uniforms[rows])',
             'torch.from_numpy(uniforms[: len(rows)])', "test_ppo.py::test_generation_is_that_of_each_prompt_alone[llama]"),
    Mutation("no_penalty", "recipes/ppo.py", 'return scores - args.missing_eos_penalty * ~samples["ended"]',
             'return scores', "test_ppo.py::test_a_score_is_model_plus_function_clipped_less_the_penalty[2]"),
    Mutation("score_at_padding", "recipes/ppo.py", 'reward_model(collate(samples, rows, args.share_prompts, accelerator.device))',
             'reward_model(collate(samples, rows, args.share_prompts, accelerator.device), torch.zeros(len(rows), dtype=torch.long))', "test_ppo.py::test_a_score_is_model_plus_function_clipped_less_the_penalty[2]"),
    Mutation("dropout_on", "recipes/ppo.py", '    disable_dropout(policy)\n',
             '', "test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"),
    Mutation("same_minibatches", "recipes/ppo.py", 'window_rows(len(lengths), args.train_batch_size, (args.seed, number, 2), window_number)',
             'window_rows(len(lengths), args.train_batch_size, (args.seed, number, 2), window_number % math.ceil(len(lengths) / args.train_batch_size))', "test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"),
    Mutation("wrong_horizon", "recipes/ppo.py", 'progress.windows_per_epoch = (rollouts_per_epoch - 1) * windows_per_rollout + last_windows',
             'progress.windows_per_epoch = rollouts_per_epoch * windows_per_rollout + last_windows', "test_ppo.py::test_every_logged_number_of_a_run[kl in the loss plain]"),
    Mutation("nan_scores", "recipes/ppo.py", ' or not np.isfinite(np.array(values, dtype=float)).all()',
             '', "test_ppo.py::test_scores_that_cannot_be_used_are_refused[values1-nan]"),
    Mutation("no_nan_check", "recipes/ppo.py", 'check_finite(seen, progress, args.output_dir, {',
             'print({', "test_ppo.py::test_a_loss_that_is_not_finite_stops_with_the_step_the_rows_and_the_tensors"),
    Mutation("late_nan_check", "recipes/ppo.py", '    check_finite([(samples["rows"], found.sum(2) + scores[:, None], mask)], metrics.progress, args.output_dir, parts)\n',
             '', "test_ppo.py::test_weights_that_are_not_finite_are_blamed_on_the_rows_that_use_them"),
    Mutation("rollout_rounding", "recipes/ppo.py", '        if prompts % step:\n',
             '        if prompts < step:\n', "test_ppo.py::test_sizes_of_a_rollout_that_do_not_divide[2-sizes0-parts0]"),
    Mutation("own_norms", "recipes/ppo.py", '/ (math.hypot(*norms.values()) or 1.0)',
             '/ (sum(norms.values()) or 1.0)', "test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"),
    Mutation("critic_from_actor", "recipes/ppo.py", 'args.critic_model_name_or_path or args.reward_model_name_or_path or args.model_name_or_path',
             'args.critic_model_name_or_path or args.model_name_or_path', "test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"),
    Mutation("aged_adam", "recipes/ppo.py", '    innermost(optimizer).register_step_post_hook(count_from_zero)\n',
             '', "test_ppo.py::test_the_critic_learns_before_the_actor"),
    Mutation("rollout_forgotten", "recipes/ppo.py", 'if (rollout := run.extra["rollout"]) is None:',
             'if (rollout := run.extra["rollout"]) is None or progress.windows_seen == 3:', "test_ppo.py::test_resumed_in_the_middle_of_a_rollout"),
    Mutation("warmup_adapts", "recipes/ppo.py", "args.kl_target * actor_learns,", "args.kl_target,", "test_ppo.py::test_the_critic_learns_before_the_actor"),
    Mutation("default_rate", "recipes/ppo.py", "critic_groups, lr=args.learning_rate, eps", "critic_groups, eps", "test_ppo.py::test_the_end_of_a_polynomial_schedule_is_that_of_the_actors_rate"),
    Mutation("other_length", "recipes/ppo.py", 'f"{train_set._fingerprint} {limits}"', "train_set._fingerprint", "test_ppo.py::test_resumed_in_the_middle_of_a_rollout"),
    Mutation("old_coefficient", "recipes/ppo.py", 'run.extra = {"kl_coef": kl_coef, "rollout": rollout}',
             'run.extra = {"kl_coef": args.kl_coef, "rollout": rollout}', "test_ppo.py::test_every_logged_number_of_a_run[kl in the reward plain]"),
    Mutation("text_too_early", "common/metrics.py", 'self.board.add_text("responses", table, next_update)',
             'self.board.add_text("responses", table, next_update - 1)', "test_ppo.py::test_tensorboard_shows_scores_and_responses[kl in the reward plain]"),
    # ------------------------------------------------------------ test_resume.py
    Mutation("copies_counted", "common/checkpoint.py", '(path for path in folder.glob("global_step_*") if path.name[12:].isdigit()), key=lambda path: int(path.name[12:]))',
             'folder.glob("global_step_*"), key=lambda path: (len(path.name), path.name))', "test_resume.py::test_going_back_leaves_behind_what_came_after"),
    Mutation("data_by_path", "common/data/dataset.py", ", new_fingerprint=content)", ")", "test_resume.py::test_going_back_leaves_behind_what_came_after"),
    Mutation("any_data", "common/data/dataset.py", "return zlib.crc32(repr(values).encode())", "return 0", "test_resume.py::test_a_checkpoint_of_another_run_is_refused"),
    Mutation("old_rate", "common/checkpoint.py", "schedule._last_lr = [", "_ = [", "test_resume.py::test_a_longer_run_has_its_own_rates_from_the_first_update_on"),
    Mutation("must_delete", "common/checkpoint.py", "shutil.rmtree(path, ignore_errors=True)", "shutil.rmtree(path)", "test_resume.py::test_what_cannot_be_deleted_does_not_end_a_run"),
    Mutation("actors_stay", "common/checkpoint.py", ', *by_step(run.folder.parent / "actors")]', "]", "test_resume.py::test_auto_does_not_begin_again_what_has_ended"),
    Mutation("no_way_back", "common/checkpoint.py", "save_checkpoint(run) if path and run.saved < 0 and run.args.save_steps else", "",
             "test_resume.py::test_a_run_that_goes_on_elsewhere_is_killed_at_once[dpo-plain]"),
    Mutation("frozen_rate", "common/checkpoint.py", "    run.scheduler.optimizer.param_groups = run.optimizer.param_groups", "    pass",
             "test_resume.py::test_killed_and_resumed_is_the_run_never_killed[sft-offload]"),
    Mutation("no_rng", "common/checkpoint.py", "    run.scheduler.optimizer.param_groups = ",
             "    set_seed(run.args.seed, device_specific=True)\n    run.scheduler.optimizer.param_groups = ",
             "test_resume.py::test_killed_and_resumed_is_the_run_never_killed[sft-ddp]"),
    Mutation("no_open_sums", "common/checkpoint.py", "{name: value.tolist() for name, value in run.metrics.open.sums.items()}", "{}",
             "test_resume.py::test_killed_and_resumed_is_the_run_never_killed[dpo-plain]"),
    Mutation("no_truncate", "common/metrics.py", "os.truncate(self.file, ", "(self.file, ",
             "test_resume.py::test_damage_is_named_and_the_checkpoint_before_taken"),
    Mutation("no_position", "common/checkpoint.py", '"skipped_steps", "windows_seen", ', '"skipped_steps", ',
             "test_resume.py::test_killed_and_resumed_is_the_run_never_killed[dpo-plain]"),
    Mutation("no_checksum", "common/checkpoint.py", "checksum(path / name))) != (size, crc):", "checksum(path / name)))[0] != size:",
             "test_resume.py::test_damage_is_named_and_the_checkpoint_before_taken"),
    # ------------------------------------------------------------ test_reward.py
    Mutation("margin_dropped", "recipes/reward.py", "-F.logsigmoid(chosen - rejected - margins)", "-F.logsigmoid(chosen - rejected)",
             "test_reward.py::test_the_loss_of_a_pair"),
    Mutation("tie_won", "recipes/reward.py", "(chosen > rejected)", "(chosen >= rejected)",
             "test_reward.py::test_metrics_of_pairs_and_of_answers"),
    Mutation("micro_batch_means", "recipes/reward.py", "(losses * weights).sum() * divisor / len(window)",
             "(losses * weights).sum() / weights.sum().clamp(min=1)", "test_reward.py::test_every_logged_number_and_the_weights_of_a_run"),
    Mutation("fillers_scored", "recipes/reward.py", "(answers, weights.repeat(2))", "(answers, torch.ones_like(weights).repeat(2))",
             "test_reward.py::test_metrics_of_pairs_and_of_answers"),
    Mutation("default_head", "common/models/load.py", "    if missing:\n        draw_score_head", "    if missing is None:\n        draw_score_head",
             "test_reward.py::test_a_new_head_is_drawn_from_the_seed_and_an_old_one_kept"),
    Mutation("no_moments", "recipes/reward.py", "accelerator.unwrap_model(model).config.update(moments)", "pass",
             "test_reward.py::test_plain_transformers_reads_the_saved_folder_alike"),
    Mutation("stale_moments", "recipes/reward.py", "            scorer.config.update(run.extra)\n        if progress", "        if progress",
             "test_reward.py::test_moments_are_of_the_weights_they_are_saved_with"),
    Mutation("dropout_left", "recipes/reward.py", "    disable_dropout(scorer)", "    # disable_dropout(scorer)",
             "test_reward.py::test_every_logged_number_and_the_weights_of_a_run"),
    Mutation("dropout_left", "recipes/dpo.py", "    prepare.disable_dropout(policy)", "    # prepare.disable_dropout(policy)",
             "test_metrics.py::test_the_eight_metrics_of_dpo[plain-more0]"),
    Mutation("engines_config", "recipes/ppo.py", "accelerator.unwrap_model(reward_model).config", "reward_model.config",
             "test_invariance.py::test_every_split_is_the_same_run[zero3-tokens-ppo]"),
    Mutation("score_before_eos", "common/models/packing.py", "layout.last[piece.number] = row_start + end - 1",
             "layout.last[piece.number] = row_start + end - 2",
             "test_reward.py::test_the_score_is_that_of_each_answer_alone_at_its_eos"),
    Mutation("answers_meet", "common/models/packing.py", "(key == query) | (key == prompt_of_query)",
             "prompts[:, None, None, :] == prompt_of_query",
             "test_reward.py::test_the_score_is_that_of_each_answer_alone_at_its_eos[llama]"),
    Mutation("window_ignored", "common/models/checks.py", "        and window >= longest\n", "",
             "test_reward.py::test_a_window_shorter_than_the_rows_ends_sharing"),
    Mutation("pad_is_eos", "recipes/reward.py", "if tokenizer.pad_token_id == tokenizer.eos_token_id:", "if tokenizer.pad_token_id is None:",
             "test_reward.py::test_what_is_refused_before_training"),
    # ------------------------------------------------------------ test_stopping.py
    Mutation("deaf", "common/checkpoint.py", "signal.signal(number, note)", "pass",
             "test_stopping.py::test_a_signal_ends_the_run_with_a_checkpoint[plain-SIGINT]"),
    Mutation("one_hears", "common/checkpoint.py", 'int(run.accelerator.reduce(torch.tensor(run.signal, device=run.accelerator.device), "max"))', "run.signal",
             "test_stopping.py::test_a_signal_ends_the_run_with_a_checkpoint[zero2-SIGUSR1]"),
    Mutation("stubborn", "common/checkpoint.py", "run.signal and time.monotonic() - run.signalled > 3", "False",
             "test_stopping.py::test_a_second_signal_ends_it_at_once"),
    Mutation("raw_failure", "common/checkpoint.py", "except (OSError, RuntimeError, SafetensorError) as error:", "except KeyError as error:",
             "test_stopping.py::test_a_full_disk_leaves_the_checkpoint_before_whole"),
    Mutation("leftovers", "common/checkpoint.py", 'shutil.rmtree(run.folder / f".{final.name}.writing", ignore_errors=True)', "pass",
             "test_stopping.py::test_a_full_disk_leaves_the_checkpoint_before_whole"),
    Mutation("blind", "common/checkpoint.py", ".free / 2**30) < number * size", ".free / 2**30) < 0", "test_stopping.py::test_a_disk_too_small_is_refused_before_training"),
    Mutation("not_universal", "common/checkpoint.py", '(path / "engine/pytorch_model/zero").is_dir()', 'False',
             "test_stopping.py::test_another_number_of_zero_processes_by_the_universal_checkpoint[2]"),
    Mutation("any_stage", "common/export.py", '.partition(" on ")[0]  # stage', '.partition(" ")[0]  # stage',
             "test_stopping.py::test_another_number_of_zero_processes_by_the_universal_checkpoint[2]"),
    Mutation("any_world", "common/checkpoint.py", 'now["world"][: len(before.get("world", ""))]', 'before.get("world", "")',
             "test_stopping.py::test_a_world_that_cannot_read_a_checkpoint_is_refused"),
    Mutation("rubbish", "common/checkpoint.py", '.glob(".global_step_*"):', '.glob(".global_step_*.old"):',
             "test_stopping.py::test_what_a_killed_save_left_is_cleared_before_the_disk_is_measured"),
    Mutation("all_remove", "common/checkpoint.py", "if run.accelerator.is_main_process:  # another", "if True:  # another",
             "test_stopping.py::test_only_the_main_process_removes_what_failed"),
    Mutation("twice", "common/checkpoint.py", "if run.saved == run.progress.global_step:", "if False:",
             "test_stopping.py::test_a_signal_while_a_checkpoint_is_written_does_not_write_it_twice"),
    Mutation("over_another", "common/launch.py", 'continues = path.resolve() / "checkpoints" == Path(args.resume).resolve().parent', "continues = path.resolve() == Path(args.resume).resolve().parent.parent",
             "test_stopping.py::test_where_a_resumed_run_goes"),
    Mutation("pool_ends", "common/checkpoint.py", "(forked and number != signal.SIGINT)", "forked",
             "test_stopping.py::test_ctrl_c_leaves_a_reward_functions_workers_to_finish"),
    Mutation("one_count", "common/export.py", "if len(steps) > 1:", "if not steps:",
             "test_stopping.py::test_step_counts_that_differ_cannot_be_moved_under_zero3"),
    # ------------------------------------------------------------ test_strategies.py
    Mutation("half_buffers", "common/models/prepare.py", "with exact_buffers(accelerator, model):\n        return accelerator.prepare", "with contextlib.nullcontext():\n        return accelerator.prepare",
             "test_strategies.py::test_buffers_are_not_rounded_with_the_weights"),
    Mutation("no_hooks", "common/zero.py", "            offload.setup_zero_stage3_hooks()", "            pass",
             "test_strategies.py::test_fp32_is_the_same_under[zero3]"),
    Mutation("shard_saved", "common/checkpoint.py", "if zero_stage(accelerator) == 3 or", "if",
             "test_strategies.py::test_the_saved_actor_is_the_one_evaluated[zero3]"),
    Mutation("moving_reference", "recipes/dpo.py", 'return reference(batch)["logps"]', 'return model(batch)["logps"]',
             "test_strategies.py::test_the_reference_stands_still"),
]
# fmt: on


def check_table() -> None:
    """Exits unless docstrings and table name the same mutations, and each text to replace occurs once."""
    named = set()
    for path in (REPOSITORY / "tests").glob("test_*.py"):
        *_, listed = ast.get_docstring(ast.parse(path.read_text())).partition("Mutations that turn it red:")
        named |= {(path.name, name) for name in re.findall(r"`(\w+)`", listed)}
    table = [(mutation.test.partition("::")[0], mutation.name) for mutation in MUTATIONS]
    problems = [
        f"{test}: {name} is in {'the docstring' if (test, name) in named else 'the table'} only" for test, name in named ^ set(table)
    ]
    problems += [f"{test}: {name} is twice in the table" for test, name in set(table) if table.count((test, name)) > 1]
    for name, file, old, *_ in MUTATIONS:
        if (times := (REPOSITORY / file).read_text().count(old)) != 1:
            problems.append(f"{name}: its text occurs {times} times in {file}: {old!r}")
    if problems:
        sys.exit("\n".join(sorted(problems)))


def run_tests(folder: Path, tests: set[str]) -> tuple[str, str]:
    """What became of the tests in the copy: `green`, `red` or `error`, and pytest's output."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "copy"), "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'pytest'}"]
    command += [f"tests/{test}" for test in sorted(tests)]
    result = subprocess.run(command, cwd=folder / "copy", env=environment, capture_output=True, text=True)
    output = result.stdout + result.stderr
    broken = re.search(r"^ERROR |^E\s+(Syntax|Name|Import|ModuleNotFound)Error|^\d+.* errors? in ", output, re.MULTILINE)
    return ("green" if result.returncode == 0 else "error" if broken or result.returncode != 1 else "red"), output


def main(names: list[str]) -> None:
    check_table()
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        sys.exit(f"no such mutation: {' '.join(sorted(unknown))}")
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        folder, undetected = Path(folder), 0
        for name in files:
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / "copy" / name)
        outcome, output = run_tests(folder, {mutation.test for mutation in chosen})
        print(f"without a mutation: {outcome}", flush=True)
        if outcome != "green":
            sys.exit(output)
        for name, file, old, new, test in chosen:
            path, start = folder / "copy" / file, time.time()
            whole = path.read_text()
            path.write_text(whole.replace(old, new))
            outcome, output = run_tests(folder, {test})
            path.write_text(whole)
            undetected += outcome != "red"
            outcome = {"green": "STILL GREEN", "error": "ERROR"}.get(outcome, outcome)
            line = f"{outcome:12} {name:17} {time.time() - start:4.0f} s  {test}"
            print(line if outcome == "red" else f"{line}\n{output[-3000:]}", flush=True)
        print(f"{len(chosen) - undetected} of {len(chosen)} mutations turn their tests red")
    sys.exit(undetected > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
