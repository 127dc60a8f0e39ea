"""The tests that `make test` leaves to `make test-more`: sweeps over all cases, compilation and export, fuzzing.

Sanitizers and long subprocesses belong to it too. `make test` keeps every promise on one case of each mixer, and a test
of every feature. What neither runs is slow: `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable

from cases import FIRST
from tokenmix import MIXERS

COMPILED = {FIRST[name] for name in ("attention", "aft_simple")}
"""Cases that `make test` compiles and exports."""

FILES = {
    "test_demo.py": "trains four models",
    "test_demo_lanes.py": "starts processes that train",
    "test_doctor_extras.py": "starts the packages of every extra",
    "test_dynamic.py": "compiles every mixer for any length",
    "test_fuzz.py": "fuzz",
    "test_fuzz_core.py": "fuzz",
    "test_gpu_minutes.py": "interprets the Triton kernels",
    "test_huggingface_trainer.py": "trains, also in two processes",
    "test_hybrid_export.py": "exports hybrids of transformers",
    "test_inductor.py": "compiles C++",
    "test_launchers.py": "starts accelerate and submitit",
    "test_kernels_build.py": "compiles the kernels, and starts the doctor",
    "test_kernels_fuzz.py": "fuzz",
    "test_kernels_hub.py": "starts a process with other functions in transformers",
    "test_onnx.py": "exports every core mixer at many sizes",
    "test_conformance.py": "the defects of public models",
    "test_peers.py": "the defects of other implementations",
    "test_sanitizers.py": "builds the kernels under sanitizers",
    "test_surgery_across.py": "every mixer in every family of hosts",
    "test_surgery_compile.py": "compiles hosts of several families",
    "test_surgery_export.py": "exports hosts of several families",
    "test_surgery_journeys.py": "saves hosts of every kind; trains, compiles and starts processes",
    "test_surgery_quality.py": "trains and compares three models",
    "test_triton.py": "interprets the Triton kernels",
    "test_triton_gemm.py": "interprets the Triton kernels",
}
"""Whole files, with the reason."""

TESTS = {
    "test_advise.py": (
        "test_candidates_of_a_decoder_stream",
        "test_every_host_is_measured_and_left_as_it_was",
        "test_images_grow",
        "test_a_module_of_ones_own_is_measured_in_onnx_runtime",
        "test_json_holds_everything",
        "test_the_runtime_asked_for_is_measured_beside_eager",
        "test_the_model_is_distilled_and_written",
        "test_the_page_stands_alone",
        "test_whisper_is_measured_in_onnx_runtime",
        "test_a_factory_may_bring_inputs",
        "test_a_module_is_taken_as_it_is",
        "test_the_state_of_a_cache_is_counted",
        "test_whisper_reads_a_whole_recording",
        "test_what_would_take_too_long_to_compile_is_left_out_and_says_so",
    ),
    "test_advise_budget.py": ("test_only_the_chosen_layers_are_distilled",),
    "test_aft_forget.py": ("test_100_000_tokens_with_half_lives_of_one_to_a_million",),
    "test_anatomy.py": ("test_a_run_and_folders_of_other_libraries_are_dissected_from_the_command_line",),
    "test_assigned_weights.py": ("test_a_meta_build_with_assigned_weights_is_the_original",),
    "test_bench_verb.py": (
        "test_another_revision_is_timed_in_turns",
        "test_levels",
        "test_every_row_says_what_was_measured",
        "test_what_would_not_fit_or_end_is_skipped",
    ),
    "test_causal_only.py": (
        "test_the_doctor_tries_one_form",
        "test_bench_measures_it",
    ),
    "test_cli.py": (
        "test_a_signal_ends_a_command_with_its_code_and_the_real_path",
        "test_a_disk_that_refuses_is_one_line_and_the_run_goes_on_later",
    ),
    "test_contract_backends.py": ("test_without_kernels_all_else_works",),
    "test_convert.py": ("test_into_every_mixer",),
    "test_eamlp_counts.py": ("test_json_meta_and_compile",),
    "test_explain.py": ("test_a_model_trained_in_seconds_translates_the_examples",),
    "test_floors.py": ("test_every_task_has_a_floor",),
    "test_generation_service.py": ("test_a_gpt2_is_trained_converted_loaded_elsewhere_timed_and_drawn",),
    "test_graphed.py": ("test_equals_extend_for_every_mixer_or_names_what_grows",),
    "test_grids.py": ("test_compiled_and_exported_programs_read_the_grid",),
    "test_hooks.py": ("test_a_hook_on_any_part_acts_alike_on_all_tokens_and_in_a_stream",),
    "test_host_timm.py": (
        "test_registered_models_have_the_papers_shapes",
        "test_every_vit_and_pyramid_of_ours_is_registered_and_none_of_timms_is_lost",
    ),
    "test_host_timm_attention.py": ("test_timm_missing_or_old",),
    "test_host_timm_pyramid.py": ("test_fx_takes_a_pyramid_apart_into_blocks",),
    "test_host_torch.py": (
        "test_compiled_whole",
        "test_encoder_equals_the_mixer_called_directly",
    ),
    "test_hub.py": (
        "test_mixers_from_outside_of_the_package",
        "test_every_model_computes_the_same_bits_in_a_fresh_process",
    ),
    "test_huggingface.py": (
        "test_decoding_compiles_whole_and_not_anew_each_step",
        "test_the_package_is_named_where_it_is_missing_or_old",
        "test_check",
    ),
    "test_huggingface_positions.py": (
        "test_a_prompt_may_end_in_padding",
        "test_an_assistant_writes_the_same_after_padding",
        "test_a_cache_goes_on_after_a_cut_and_a_choice_of_rows",
    ),
    "test_image_density.py": ("test_greedy_completion_keeps_the_rows_and_is_the_argmax_of_the_parallel_form",),
    "test_image_recipes.py": ("test_every_row_runs_small_and_keeps_its_mixers",),
    "test_image_training.py": ("test_reports_of_images",),
    "test_kernels.py": (
        "test_compiles_whole",
        "test_the_operators_pass_opcheck",
        "test_adversarial_keys",
        "test_one_thread_gives_the_same_bits_as_two",
    ),
    "test_kernels_aft_band.py": (
        "test_adversarial_keys_conv",
        "test_adversarial_keys_local",
    ),
    "test_kernels_decode.py": (
        "test_decoding_compiles_whole",
        "test_streaming_in_any_cuts_is_the_parallel_form_and_the_eager_stream",
    ),
    "test_kernels_hydra.py": ("test_adversarial_keys_of_other_maps",),
    "test_kernels_hybrids.py": (
        "test_a_compiled_model_is_the_same",
        "test_checkpointed_gradients_are_the_same",
        "test_each_way_to_tell_of_documents_is_enough",
        "test_half_precision_is_as_near_to_float32_as_transformers_is",
    ),
    "test_kernels_nonfinite.py": ("test_only_rows_that_may_attend_it_are_not_finite",),
    "test_kernels_recurrence.py": (
        "test_4096_tokens",
        "test_compiles_without_graph_breaks",
    ),
    "test_layering.py": ("test_old_names_say_where_a_module_is",),
    "test_lm.py": ("test_five_thousand_bytes_of_streaming_are_the_parallel_form",),
    "test_lm_mixers.py": (
        "test_prompts_of_different_lengths_go_on_as_each_does_alone",
        "test_a_step_in_bf16_and_its_evaluation_are_finite",
    ),
    "test_logs.py": ("test_sigkill_leaves_logs_that_can_be_read",),
    "test_long_backward.py": (
        "test_64k_tokens",
        "test_killed_at_any_write_it_gives_the_same_bits",
    ),
    "test_mae.py": (
        "test_pages_and_files_show_reconstructions",
        "test_kept_positions_are_the_masked_full_sequence",
    ),
    "test_new_mixer.py": (
        "test_a_new_mixer_keeps_the_contract",
        "test_its_lines_are_narrow_enough_for_any_name",
        "test_a_recurrence_is_causal_only_and_keeps_its_state_in_float32",
    ),
    "test_own_mixer.py": (
        "test_bench_judges_and_times_it",
        "test_it_is_listed_and_diagnosed",
        "test_advise_measures_it",
        "test_it_is_exported",
    ),
    "test_own_parts.py": ("test_an_example_is_short_killed_and_resumed_to_the_same_numbers",),
    "test_own_streaming.py": ("test_the_example_of_the_page_keeps_every_promise",),
    "test_own_task.py": ("test_it_is_trained_killed_resumed_exported_swept_and_reported",),
    "test_pair_positions.py": ("test_exported_programs_take_any_length",),
    "test_parallel.py": (
        "test_64_ranks",
        "test_1024_ranks",
        "test_16_ranks_pass_their_keys_on",
    ),
    "test_points.py": ("test_classifier_and_segmenter_ignore_the_order_of_points",),
    "test_public_names.py": ("test_a_type_checker_knows_classes_and_options",),
    "test_pyramid.py": (
        "test_channels_last_half_precision_and_compile",
        "test_every_mixer_stands_in_every_stage",
    ),
    "test_ranks.py": (
        "test_four_ranks_equal_one_process",
        "test_torchrun_runs_the_example",
    ),
    "test_ranks_training.py": (
        "test_batch_norms_of_four_ranks",
        "test_each_rank_adds_its_share_of_what_a_teacher_says",
        "test_four_ranks_train_as_one_process",
        "test_what_four_ranks_began_others_go_on_with",
        "test_what_four_ranks_began_one_process_goes_on_with",
        "test_what_one_process_began_sharded_ranks_go_on_with",
        "test_killed_ranks_leave_the_same_bits",
        "test_a_full_disk_of_one_rank_ends_all_and_loses_nothing",
        "test_where_nobody_answers_a_rank_ends_in_one_line",
        "test_what_does_not_fit_ends_every_rank_of_torchrun_in_one_line",
    ),
    "test_recipes.py": (
        "test_every_row_builds_at_every_size_and_goes_to_json",
        "test_every_row_of_text_trains",
    ),
    "test_reformer.py": (
        "test_the_paper_form_is_accurate",
        "test_the_paper_form_keeps_every_other_promise",
    ),
    "test_rows.py": ("test_a_sweep_of_rows_with_slashes_runs_and_goes_on",),
    "test_segmentation.py": ("test_json_meta_and_compile",),
    "test_segmentation_training.py": ("test_every_row_takes_a_smoke_step",),
    "test_sentence_service.py": (
        "test_an_encoder_is_taught_saved_timed_and_drawn",
        "test_too_few_texts_are_one_line",
    ),
    "test_seq2seq.py": ("test_a_wide_beam_finds_what_a_search_of_everything_finds",),
    "test_sinkhorn.py": ("test_sortcut_keeps_every_promise",),
    "test_surgery.py": ("test_every_mixer_that_fits_runs_and_learns",),
    "test_surgery_adapter.py": ("test_a_described_model_is_distilled_compared_and_exported",),
    "test_surgery_auto_classes.py": ("test_a_fresh_process_loads_what_another_saved",),
    "test_surgery_by_hand.py": (
        "test_a_model_of_transformers_changed_by_hand",
        "test_a_mixer_assigned_by_hand_is_distilled_compared_and_exported",
    ),
    "test_surgery_distil.py": ("test_both_phases_learn",),
    "test_sweep.py": (
        "test_every_row_of_the_projects_plans_can_be_built",
        "test_a_row_names_a_mixer_of_your_own",
        "test_sweeps_with_parts_of_a_plan_share_a_file",
        "test_a_worker_whose_sweep_was_killed_before_it_could_look_trains_nothing",
        "test_the_best_rates_are_tried_again_over_all_steps",
        "test_rates_are_added_to_a_sweep",
        "test_rows_and_seeds_are_added_to_a_sweep",
        "test_any_kill_leaves_the_same_table",
        "test_a_file_that_many_write_loses_nothing",
        "test_runs_start_from_those_of_another_sweep",
        "test_rows_of_a_plan_can_be_run_alone",
        "test_classifiers_of_texts_are_compared_by_accuracy",
    ),
    "test_synthetic.py": ("test_a_sweep_takes_the_rate_with_the_highest_accuracy",),
    "test_testing.py": ("test_a_right_mixer_passes",),
    "test_text_files.py": ("test_a_large_file_is_unpacked_and_joined_in_chunks",),
    "test_train.py": (
        "test_killed_three_times_it_gives_the_same_bits",
        "test_bf16_and_compile_train_like_fp32",
    ),
    "test_train_options.py": ("test_data_means_the_same_to_train_sweep_and_eval",),
    "test_transhuman.py": ("test_the_commands",),
    "test_vision_pictures.py": ("test_every_mixer_of_the_core_is_drawn",),
    "test_vit.py": ("test_channels_last_half_precision_and_compile",),
}
"""Single tests that take more than a few seconds and sweep over rows, rebuild or start processes."""


def is_more(file: str, test: str, params: dict[str, object]) -> bool:
    """Return whether a test belongs to `make test-more`."""
    if file in FILES or test in TESTS.get(file, ()):
        return True
    case, promise = params.get("case"), str(params.get("promise"))
    if file == "test_contract.py" and test == "test_promise":
        return case not in FIRST.values() or (promise.startswith(("compiles", "exports")) and case not in COMPILED)
    if file == "test_parallel.py" and test == "test_equals_one_process":
        return case not in FIRST.values()
    if file == "test_contract_backends.py" and test in ("test_cpu", "test_eager"):
        return test == "test_eager" or case not in {FIRST[name] for name in MIXERS if MIXERS[name].facts.kernels.whole}
    if file == "test_kernels_hybrids.py":
        return params.get("name") not in (None, *FAMILIES)
    if file == "test_ranks_training.py" and {"job", "layout"} & params.keys():
        return f"{params.get('job', 'parts')} {params.get('layout', '')}" in FURTHER_RANKS
    if test == "test_guesses_leave_the_text_as_it_is":
        return params["rows"] != 1
    if test == "test_a_planted_bug_is_noticed" and getattr(params.get("bug"), "name", "") in LONG_BUGS:
        return True
    if file == "test_docs.py" and test == "test_examples_run" and getattr(params.get("page"), "stem", "") in LONG_PAGES:
        return True
    return file in ("test_gated_delta.py", "test_positions.py") and case is not None and case not in FIRST.values()


FAMILIES = ("qwen3_next", "kimi_linear", "falcon_h1", "lfm2", "nemotron_h")
"""Hybrids of transformers that `make test` puts on the kernels: one of each kind of layer, one with limits of steps."""

FURTHER_RANKS = {
    "fp16 float32 whole",
    "bf16 float32 fsdp",
    "penalty float32 whole",
    "compiled float32 whole",
    "compiled float32 fsdp",
    "parts whole",
}
"""Jobs of several processes and their layouts that repeat what another does in `make test`, or compile."""

LONG_BUGS = ("compiled code computes something else",)
"""Planted bugs that take a compiler to notice."""

LONG_PAGES = ("advise", "onnx")
"""Pages whose examples export or measure whole models."""

LONG = ("compiles", "exports", "differentiable_twice")
"""How the names of the longest promises begin."""

INTERPRETED = ("scan_shapes", "hydra_all", "forget_masks", "linear_shapes", "full_shapes", "band_masks")
"""How the names of Triton checks begin that `make test-more` runs in Triton's interpreter: one of each kind."""

EXPORTED = ("attention", "aft_forget", "hydra")
"""Mixers that `make test-more` exports to ONNX at many sizes; the contract exports every mixer at one."""

REPORTED = ("a row written one too long", "a buffer that threads share")
"""Bugs planted for sanitizers in `make test-more`."""

SPREAD = ("hydra", "lightconv")
"""Cases that `make test-more` spreads over 1,024 ranks."""


def further(params: dict[str, object]) -> bool:
    """Return whether a test is about another than the first case of a mixer."""
    return params.get("case") not in FIRST.values()


def uncommon_kernel(params: dict[str, object]) -> bool:
    """Return whether a check of a Triton kernel repeats what another checks, on other shapes or options."""
    return not str(params["check"]).startswith(INTERPRETED)


def always(params: dict[str, object]) -> bool:
    """Return True: the whole test is long."""
    return True


SLOW: dict[tuple[str, str], Callable[[dict[str, object]], bool]] = {
    ("test_advise.py", "test_images_grow"): always,
    ("test_advise.py", "test_the_runtime_asked_for_is_measured_beside_eager"): always,
    ("test_advise.py", "test_whisper_is_measured_in_onnx_runtime"): always,
    ("test_advise.py", "test_whisper_reads_a_whole_recording"): always,
    ("test_contract.py", "test_promise"): lambda p: further(p) and str(p["promise"]).startswith(LONG),
    ("test_contract_backends.py", "test_eager"): always,  # repeats test_contract.py, in float32
    ("test_cost.py", "test_bytes_kept_for_backward"): further,
    ("test_cost.py", "test_flops"): further,
    ("test_onnx.py", "test_core_mixers"): lambda p: p["name"] not in EXPORTED,
    ("test_positions.py", "test_positions_of_masked_tokens_say_nothing"): further,
    ("test_positions.py", "test_right_or_refused"): further,
    ("test_parallel.py", "test_1024_ranks"): lambda p: p["case"] not in SPREAD,
    ("test_sanitizers.py", "test_a_planted_bug_is_reported"): lambda p: p["bug"] not in REPORTED,
    ("test_sanitizers.py", "test_clean"): lambda p: (p["kind"], p["isa"]) == ("thread", "base"),
    ("test_triton.py", "test_in_the_interpreter"): uncommon_kernel,
    ("test_triton_gemm.py", "test_in_the_interpreter"): uncommon_kernel,
}
"""The parameters with which a test belongs to `make test-all` alone: what takes longest, beyond one of each kind."""


def is_slow(file: str, test: str, params: dict[str, object]) -> bool:
    """Return whether a test belongs to `make test-all` alone."""
    late = SLOW.get((file, test))
    return late is not None and late(params)
